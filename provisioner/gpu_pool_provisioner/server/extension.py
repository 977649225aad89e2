"""What a Jupyter server loads of this package: it answers pages, saves notebooks, and starts templates.

The installation switches it on (``jupyter_server_config.d``). It reads the kernelspecs once, in a
thread, when the server has started. Where none asks for a template with the server,
nothing else of this package is imported before a page asks.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any, Final

from jupyter_core.utils import ensure_async

from gpu_pool_provisioner.jupyter_files import before_saving, config_of

#: The provisioner's section in the server's configuration.
_SECTION: Final = "GPUPoolProvisioner"
#: Seconds between two looks at a template that imports.
_LOOK_EVERY: Final = 0.2


def _load_jupyter_server_extension(server: Any) -> None:
    """Answer pages; start templates when the event loop runs. Called by jupyter_server with its app."""
    from gpu_pool_provisioner.server.handlers import add_handlers

    add_handlers(server)
    _leave_kernels_at_the_end(server)
    _cull_no_kernel_that_goes_to_disk(server)
    _end_by_sigint_as_by_sigterm(server)
    _leave_notices_out_of_files(server)
    server.io_loop.add_callback(start_templates, server)


def _leave_notices_out_of_files(server: Any) -> None:
    """Let no notebook be saved that says for good that its cell waits."""
    register = getattr(server.contents_manager, "register_pre_save_hook", None)
    if register is None:  # of jupyter_server before 2, or of a kind that has no hooks
        server.log.warning("Notebooks that are saved while a cell waits for a GPU slice keep what it shows.")
    else:
        register(before_saving)


def _leave_kernels_at_the_end(server: Any) -> None:
    """Let kernels go to disk that are to go on with the next server, before this one shuts them down.

    It shuts down all of them when it ends, and each by itself where somebody asks for that: only by this can
    they be told apart.
    """
    manager = server.kernel_manager
    shut_down = manager.shutdown_all

    async def leave_and_shut_down(now: bool = False) -> None:
        kernels = [manager.get_kernel(each) for each in manager.list_kernel_ids()]
        provisioners: list[Any] = [getattr(each, "provisioner", None) for each in kernels]
        leaving = [each for each in provisioners if getattr(each, "leaves_image", False)]
        if leaving:
            from gpu_pool_provisioner.server.leaving import leave

            try:
                await leave(leaving, server)
            except Exception:  # the server ends all the same
                server.log.exception("Kernels that were to go to disk end with this server.")
        await ensure_async(shut_down(now=now))

    manager.shutdown_all = leave_and_shut_down


def _cull_no_kernel_that_goes_to_disk(server: Any) -> None:
    """Let the server's culler of idle kernels pass over those on disk, and those that go there by themselves.

    On disk a kernel costs nothing that the culler is for, and culled it would lose what it keeps there. One
    that has to stay awake is culled as always.
    """
    manager = server.kernel_manager
    cull = getattr(manager, "cull_kernel_if_idle", None)
    if cull is None:  # a manager of another kind, which culls none
        return

    async def cull_what_stays_awake(kernel_id: str) -> None:
        provisioner = getattr(manager.get_kernel(kernel_id), "provisioner", None)
        if not getattr(provisioner, "goes_to_disk", False):
            await ensure_async(cull(kernel_id))

    manager.cull_kernel_if_idle = cull_what_stays_awake


def _end_by_sigint_as_by_sigterm(server: Any) -> None:
    """Let a server end in order to which JupyterHub sends SIGINT, as its spawners of local processes do.

    Without a terminal, jupyter_server leaves that signal to Python: its loop is broken off, and kernels end
    unasked. With one, it asks whoever is there, or the Hub has changed that.
    """
    is_left = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stop = getattr(server, "_signal_stop", None)
    if is_left and stop is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)


async def start_templates(server: Any) -> None:
    """Start the templates that kernelspecs ask for, one after the other."""
    gateway = getattr(server, "gateway_config", None)
    if gateway is not None and gateway.gateway_enabled:
        return  # kernels run elsewhere
    try:
        specs = await ensure_async(await asyncio.to_thread(server.kernel_spec_manager.get_all_specs))
        settings = server.config.get(_SECTION, {})
        asking = sorted(name for name, entry in specs.items() if _asks(entry["spec"], settings))
    except Exception as error:  # noqa: BLE001 - whoever asks for the kernelspecs next is told
        server.log.warning("No template starts with the server: %r", error)
        return
    for name in asking:
        await _try_to_start(server, name)


def _asks(spec: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a kernelspec, or the server's configuration, asks for its template with the server."""
    config = config_of(spec)
    return config is not None and bool({**settings, **config}.get("preload_with_server"))


async def _try_to_start(server: Any, name: str) -> None:
    try:
        await _start_template(server, name)
    except Exception as error:  # noqa: BLE001 - its kernels start as always
        why = getattr(error, "message", repr(error))
        server.log.warning("The template of the kernel %s does not start with the server: %s", name, why)


async def _start_template(server: Any, name: str) -> None:
    # Imported here, since most servers need none of it before their first kernel.
    from jupyter_client.provisioning.factory import KernelProvisionerFactory

    # As the first kernel's manager would be made, which tells its command and its settings.
    manager, _, kernel_id = server.kernel_manager.pre_start_kernel(name, {})
    factory = KernelProvisionerFactory.instance(parent=server.kernel_manager)
    provisioner: Any = factory.create_provisioner_instance(kernel_id, manager.kernel_spec, parent=manager)
    template = await provisioner.start_template(manager.format_kernel_cmd())
    if template is None:
        return
    # One at a time. Not in a thread, for which the end of the server would wait.
    while template.is_importing:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_EVERY)
    if template.is_ready:
        server.log.info("The template of the kernel %s is ready: kernels start warm.", name)
