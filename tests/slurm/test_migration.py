"""The page for those who come from another provisioner is followed word for word."""

from __future__ import annotations

import sys
from pathlib import Path

from support.shell_blocks import ROOT, Shell, blocks
from support.slurm import Slurm
from support.terminal import eventually

_PAGE = "docs/administrator/slurm-migration.md"


def test_the_page_for_those_who_come_from_another_provisioner(accounted: Slurm, tmp_path: Path) -> None:
    slurm = accounted
    slurm.run("sacctmgr", "--immediate", "add", "account", "training2411")
    user = slurm.run("id", "-un").strip()
    slurm.run("sacctmgr", "--immediate", "add", "user", user, "account=training2411")
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    shell = Shell(
        tmp_path,
        {
            **slurm.environment,
            "PATH": path,
            "HOME": str(tmp_path),
            "JUPYTER_PATH": f"{tmp_path}/here/share/jupyter:{tmp_path}/old",
            "JUPYTER_DATA_DIR": f"{tmp_path}/old",
            "JUPYTER_CONFIG_DIR": str(tmp_path),
            "XDG_RUNTIME_DIR": str(tmp_path),
            "GPU_POOL_URL": "",
        },
    )
    here = str(Path(__file__).relative_to(ROOT))
    try:
        for block in blocks(_PAGE):
            if block.file or block.mark == f"run by {here}":
                shell.follow(block)
            if block.file.endswith(".json"):  # of a kernelspec that there is already
                old = tmp_path / "old" / "kernels" / block.file.removesuffix(".json")
                old.mkdir(parents=True)
                (tmp_path / block.file).rename(old / "kernel.json")
    finally:
        shell.close()
    how = ("--noheader", "--parsable2", "--allocations", "--starttime=now-1days", "--accounts=training2411")

    def is_accounted() -> bool:  # which is later than the job's end
        shown = slurm.run("sacct", *how, "--format=Account,Partition,AllocTRES")
        return "training2411|gpu|" in shown and "gres/gpu=1" in shown

    eventually(is_accounted)
    slurm.run("sacctmgr", "--immediate", "delete", "user", user, "account=training2411")
