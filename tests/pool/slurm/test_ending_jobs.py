"""Jobs whose leases have ended are cancelled, whatever becomes of one of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.slurm import launching
from gpu_pool.slurm.backend import SlurmBackend
from gpu_pool.slurm.settings import SlurmSettings
from gpu_pool_client import Lease, PoolUnreachable
from support.pools import eventually

_SCANCEL = """#!/bin/sh
echo "$2" >>"{log}"
{fault}
"""
_SCONTROL = """#!/bin/sh
echo "JobId=$5 JobState=RUNNING"
"""
_REFUSED = 'test "$2" != 2 || { echo "Access/permission denied" >&2; exit 1; }'
_AWAY = 'echo "Unable to contact slurm controller" >&2; exit 1'


@pytest.fixture
async def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlurmBackend]:
    """Return one that knows of three jobs."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = SlurmBackend(tmp_path / "slurm.db", SlurmSettings())
    for number in "123":
        folder = launching.base() / f"{found._mark}-{number}-x-1"
        folder.mkdir(parents=True)
        (folder / "job").write_text(number)
    for name, text in (("scontrol", _SCONTROL), ("squeue", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    await found.observe(_living)
    yield found
    await found.close()


async def _living() -> list[Lease]:
    return []


def _cancels(folder: Path, fault: str) -> Path:
    """Have jobs cancelled, but for this; return where it stands which it was tried of."""
    log = folder / "log"
    (folder / "scancel").write_text(_SCANCEL.format(log=log, fault=fault))
    (folder / "scancel").chmod(0o755)
    return log


async def test_one_job_that_cannot_be_cancelled_holds_up_no_other(
    backend: SlurmBackend, tmp_path: Path
) -> None:
    log = _cancels(tmp_path, _REFUSED)
    with pytest.raises(PoolUnreachable, match="Access/permission denied"):
        await backend.unbind(_living)
    assert log.read_text().split() == ["1", "2", "3"]
    log = _cancels(tmp_path, "")
    await backend.unbind(_living)
    assert log.read_text().split() == ["1", "2", "3", "2"]


async def test_a_job_whose_number_is_not_written_yet_is_read_again(
    backend: SlurmBackend, tmp_path: Path
) -> None:
    (job,) = launching.base().glob("*-3-x-1/job")
    job.write_text("")
    log = _cancels(tmp_path, "")
    other = SlurmBackend(tmp_path / "slurm.db", SlurmSettings())

    async def cancelled() -> list[str]:
        await other.observe(_living)
        await other.unbind(_living)
        return log.read_text().split()

    assert await cancelled() == ["1", "2"]
    job.write_text("3")
    assert await eventually(cancelled, lambda numbers: len(numbers) > 2) == ["1", "2", "3"]
    await other.close()


async def test_where_slurm_does_not_answer_it_is_not_asked_for_every_job(
    backend: SlurmBackend, tmp_path: Path
) -> None:
    log = _cancels(tmp_path, _AWAY)
    with pytest.raises(PoolUnreachable, match="Slurm does not answer"):
        await backend.unbind(_living)
    assert log.read_text().split() == ["1"]
