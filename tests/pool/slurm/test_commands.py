"""Which variables of the server's Slurm's commands have, and so the jobs and steps that they start."""

from __future__ import annotations

import pytest

from gpu_pool.slurm.commands import ask, environment_of_looks

_SECRETS = ("JUPYTERHUB_API_TOKEN", "AWS_SECRET_ACCESS_KEY")
#: By which sbatch would make something else of a kernel's job.
_OTHERWISE = (
    "SBATCH_ARRAY_INX",
    "SBATCH_CLUSTERS",
    "SBATCH_GPUS",
    "SBATCH_GPUS_PER_NODE",
    "SBATCH_WAIT",
    "SLURM_CLUSTERS",
)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *_SECRETS,
        *_OTHERWISE,
        "SLURM_CONF",
        "SLURM_JWT",
        "SBATCH_ACCOUNT",
        "CUDA_VISIBLE_DEVICES",
        "TZ",
    ):
        monkeypatch.setenv(name, "value")


@pytest.mark.usefixtures("environ")
def test_a_job_has_no_secret_of_its_server_and_is_one_job() -> None:
    has = {line.partition("=")[0] for line in ask("env").splitlines()}
    assert not has.intersection({*_SECRETS, *_OTHERWISE})
    assert has >= {"SLURM_CONF", "SLURM_JWT", "SBATCH_ACCOUNT", "TZ", "PATH"}
    assert "CUDA_VISIBLE_DEVICES" not in has


@pytest.mark.usefixtures("environ")
def test_a_look_at_a_node_has_what_finds_gpus_and_no_token() -> None:
    has = environment_of_looks()
    assert not has.keys() & {*_SECRETS, *_OTHERWISE, "SLURM_JWT"}
    assert has.keys() >= {"SLURM_CONF", "CUDA_VISIBLE_DEVICES", "TZ", "PATH"}
