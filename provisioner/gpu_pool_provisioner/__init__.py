"""What Jupyter calls: a lease when a kernel starts, its return when it ends."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Name what a Jupyter server loads of this package. Called by jupyter_server."""
    return [{"module": "gpu_pool_provisioner.server.extension"}]
