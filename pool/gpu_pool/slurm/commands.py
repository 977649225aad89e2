"""How Slurm is asked: by its commands, with one time-out, one environment, and words for what went wrong."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from gpu_pool_client import NotAllowed, PoolUnreachable

#: Seconds for Slurm to answer. Its commands try for longer than a minute while slurmctld is away.
_ANSWERS_WITHIN: Final = 120.0
_MOST_WORDS: Final = 500
#: By what Slurm's commands are found and set, and who the user is; not what a person has set about the form
#: of their output, nor what would make of a kernel's job several jobs, one with more GPUs, one that sbatch
#: waits for, or one of another cluster, whose nodes and jobs these commands would not tell of. A job has them
#: as well.
_NEEDED: Final = re.compile(
    r"SLURM_(?!CLUSTERS$).*|LC_.*|SBATCH_(?!(ARRAY_INX|CLUSTERS|GPUS.*|WAIT)$).*"
    r"|PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ",
    re.ASCII,
)
#: The variable with a token by which Slurm's commands sign in where they do not by munge (auth/jwt).
TOKEN: Final = "SLURM_JWT"  # noqa: S105 - its name
#: What they say where Slurm does not answer, or not to whoever asks.
_NO_ANSWER: Final = ("Unable to contact", "Socket timed out", "Connection refused")
_NOT_SIGNED_IN: Final = ("authentication error", "Zero Bytes were transmitted", "Munge encode failed")
#: By what GPUs are found, and this project.
_OF_DEVICES: Final = re.compile(r"(GPU_POOL|CUDA|NVIDIA|NVML)_.*|PYTHONPATH", re.ASCII)
_ANOTHER: Final = "Start Jupyter with another one (scontrol token), or ask the administrator."


def _refused(token: str) -> str:
    """Say that Slurm does not take a token, and since when, if that is in it (RFC 7519, ``exp``)."""
    try:
        content = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(content + "=" * (-len(content) % 4)))
        ended = datetime.fromtimestamp(int(claims["exp"]))
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError):
        return f"Slurm does not take the token in {TOKEN}."
    if ended.timestamp() > time.time():
        return f"Slurm does not take the token in {TOKEN}."
    return f"The token for Slurm in {TOKEN} has expired: it was good until {ended:%Y-%m-%d %H:%M:%S}."


def environment_of_steps() -> dict[str, str]:
    """Return the variables with which a step is started: none that says what the job asked for.

    ``srun`` takes those for options: a job's ``SLURM_GPUS=3`` would be asked of the one node of a step.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SRUN_"))
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
    if environ is None:
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
    if any(each in said for each in _NOT_SIGNED_IN) and (token := environ.get(TOKEN)):
        raise PoolUnreachable(_refused(token), _ANOTHER)
    if any(each in said for each in (*_NO_ANSWER, *_NOT_SIGNED_IN)):
        raise PoolUnreachable(f"Slurm does not answer: {said}")
    what = "Slurm refuses the kernel's job" if words[0] == "sbatch" else f"Slurm's {words[0]} fails"
    raise NotAllowed(f"{what}: {said}", "Ask for something else, or ask the administrator.")
