"""What can be configured of the server's part: as ``GPUPoolServer`` in the Jupyter server's configuration."""

from __future__ import annotations

from traitlets.config import Configurable

from gpu_pool_client._traits import Seconds, WholeNumber


class GPUPoolServer(Configurable):
    """How a Jupyter server tells its pages of the slices of its kernels, and what it does when it ends."""

    max_streams = WholeNumber(
        500,
        min=1,
        max=1_000_000,
        config=True,
        help="Pages that listen at once. One more is refused, and may ask again.",
    )
    memory_every = Seconds(
        5.0,
        min=1,
        max=600,
        config=True,
        where="It is set in the server's configuration.",
        help="Seconds between two measurements of the GPU memory that a kernel uses, while a page listens.",
    )
    leave_within = Seconds(
        8.0,
        min=1,
        max=3600,
        config=True,
        where="It is set in the server's configuration.",
        help="""Seconds in which kernels go to disk when the server is stopped (hibernate_with_server).

        Fewer than those after which whoever stops it kills it: JupyterHub's LocalProcessSpawner after 10.
        """,
    )
