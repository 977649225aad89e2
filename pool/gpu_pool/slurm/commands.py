"""How Slurm is asked: by its commands, with one time-out, one environment, and words for what went wrong."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from typing import Final

from gpu_pool_client import NotAllowed, PoolUnreachable

#: Seconds for Slurm to answer. Its commands try for longer than a minute while slurmctld is away.
_ANSWERS_WITHIN: Final = 120.0
_MOST_WORDS: Final = 500
#: By what Slurm's commands are found and set, and who the user is; not what a person has set about the form
#: of their output. A job has them as well, which is why the user's token is not among them.
_NEEDED: Final = re.compile(
    r"(SLURM_(?!JWT$)|SBATCH_|LC_).*|PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ", re.ASCII
)
#: By what GPUs are found, and this project.
_OF_DEVICES: Final = re.compile(r"(GPU_POOL|CUDA|NVIDIA|NVML)_.*|PYTHONPATH", re.ASCII)
#: By which Slurm's commands find their cluster.
_OF_THE_CLUSTER: Final = ("SLURM_CONF", "SLURM_CLUSTERS")


def environment_of_steps() -> dict[str, str]:
    """Return the variables with which a step is started: none that says what the job asked for.

    ``srun`` takes those for options: a job's ``SLURM_GPUS=3`` would be asked of the one node of a step.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in _OF_THE_CLUSTER or not name.startswith(("SLURM_", "SRUN_"))
    }


def environment_of_looks() -> dict[str, str]:
    """Return the variables of a step that looks for GPUs: no others than it needs."""
    return {
        name: value
        for name, value in environment_of_steps().items()
        if _NEEDED.fullmatch(name) or _OF_DEVICES.fullmatch(name)
    }


def ask(
    *words: str, told: str = "", environ: Mapping[str, str] | None = None, within: float = _ANSWERS_WITHIN
) -> str:
    """Run a command of Slurm's, with this on its standard input, and return what it printed.

    Its variables are those of this process that Slurm's commands need, or ``environ``. It has ``within``
    seconds.

    Raises ``PoolUnreachable`` where there is none, or no answer; ``NotAllowed``, with its words, where Slurm
    refuses.
    """
    if environ is None:  # a job that is submitted has these as well: nothing secret may be among them
        environ = {name: value for name, value in os.environ.items() if _NEEDED.fullmatch(name)}
    try:
        done = subprocess.run(
            words,
            input=told,
            env={**environ, "SLURM_TIME_FORMAT": "standard"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PoolUnreachable(f"Slurm does not answer: {words[0]} has taken {within:g} s.") from None
    except OSError as error:
        raise PoolUnreachable(
            f"Slurm's {words[0]} cannot be run: {error.strerror}.",
            "Start Jupyter where Slurm's commands are.",
        ) from error
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split())[:_MOST_WORDS]
    if "Unable to contact" in said or "Socket timed out" in said or "Connection refused" in said:
        raise PoolUnreachable(f"Slurm does not answer: {said}")
    what = "Slurm refuses the kernel's job" if words[0] == "sbatch" else f"Slurm's {words[0]} fails"
    raise NotAllowed(f"{what}: {said}", "Ask for something else, or ask the administrator.")
