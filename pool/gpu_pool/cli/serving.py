"""``serve``: the pool as a service, for everybody on this machine."""

from __future__ import annotations

import click

from gpu_pool.cli.session import CommandSession, verb


@verb(
    "serve",
    "gpu-pool serve",
    "gpu-pool serve --socket /run/gpu-pool/gpu-pool.sock --mode 0666",
    "gpu-pool serve --kubernetes",
)
@click.option(
    "--socket",
    metavar="PATH",
    help="Where to listen. By default /run/gpu-pool/gpu-pool.sock for root, "
    "$XDG_RUNTIME_DIR/gpu-pool/gpu-pool.sock for others.",
)
@click.option("--mode", metavar="MODE", help="The socket's mode, 0600 by default; 0666 lets every user in.")
@click.option("--store", metavar="PATH", help="The store, by default that of an embedded pool.")
@click.option(
    "--kubernetes", is_flag=True, default=None, help="Serve a cluster's GPUs: kernels run there, in pods."
)
def serve(
    _session: CommandSession,
    socket: str | None,
    mode: str | None,
    store: str | None,
    kubernetes: bool | None,
) -> int:
    """Serve this machine's pool on a Unix socket, to its users and to containers.

    Clients name it as GPU_POOL_URL=unix:PATH. Ends with SIGTERM or Ctrl-C;
    kernels and commands on slices go on, and so do those who wait, once it is
    started again.
    """
    # Imported here because no other verb needs what it costs.
    from traitlets.config import Config

    from gpu_pool.service.app import ServeApp

    given = {"socket": socket, "mode": mode, "store": store, "kubernetes": kubernetes}
    app = ServeApp()
    app.configure(Config({"ServeApp": {name: value for name, value in given.items() if value is not None}}))
    app.start()
    return 0
