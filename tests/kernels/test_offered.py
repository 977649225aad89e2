"""Kernels that are offered over those that another manager than Jupyter's own finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel

from gpu_pool_kernels.offered import KERNELS_VARIABLE, OfferedKernels

NAME = "conda-env-PythonData-py"


class Environments(KernelSpecManager):
    """Finds one kernel, and names it as it likes, as managers of conda environments do."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - one of a test's own is set on the object

    def get_all_specs(self) -> dict[str, Any]:
        spec = {
            "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": "PythonData",
            "language": "python",
            "env": {},
            "metadata": self.metadata,
        }
        return {NAME: {"resource_dir": str(self.data_dir), "spec": spec}}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        entry = self.get_all_specs()[kernel_name]
        return KernelSpec(resource_dir=entry["resource_dir"], **entry["spec"])


@pytest.fixture
def environments(tmp_path: Path) -> Environments:
    return Environments(data_dir=str(tmp_path))


@pytest.mark.parametrize("slices", [None, '["2%"]'])
def test_names_with_capitals_are_found(
    environments: Environments, monkeypatch: pytest.MonkeyPatch, slices: str | None
) -> None:
    if slices is None:
        monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(KERNELS_VARIABLE, slices)
    manager = OfferedKernels(inner=environments)
    shown = manager.get_all_specs()
    assert len(shown) == (1 if slices is None else 2)
    for name, entry in shown.items():
        assert manager.get_kernel_spec(name).display_name == entry["spec"]["display_name"]
    with pytest.raises(NoSuchKernel):
        manager.get_kernel_spec("nothing")


def test_a_provisioner_that_is_not_named_as_jupyter_does_hides_no_kernels(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, '["2%"]')
    environments.metadata = {"kernel_provisioner": "local-provisioner"}
    assert NAME in OfferedKernels(inner=environments).get_all_specs()
