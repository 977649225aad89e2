"""What runs inside an IPython kernel on a slice: ``%gpu``, and a word on memory that ran out.

It runs in environments where nothing of this project is installed, so it needs
the standard library and IPython only, and Python 3.6 or newer. ``launch.py``
loads this folder, by its path, as an IPython extension of a private name; where
the project is installed, ``%load_ext gpu_pool_kernels.inkernel`` does the same.
"""


def load_ipython_extension(shell: object) -> None:
    """Give ``shell`` the magic ``%gpu`` and watch its cells for exhausted GPU memory.

    IPython calls this with its ``InteractiveShell``. A failure of ours is one
    line on stderr: the kernel is more important.
    """
    try:
        from . import extension

        extension.load(shell)
    except Exception as error:  # noqa: BLE001 - nothing of ours may keep a kernel from starting
        import sys

        print(f"gpu-pool: no %gpu in this kernel: {error!r}", file=sys.__stderr__)  # not to a notebook
