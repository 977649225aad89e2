"""Where kernelspecs that were installed before find ``gpu_pool_provisioner.wrap``."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("gpu_pool_provisioner.wrap", run_name="__main__", alter_sys=True)
