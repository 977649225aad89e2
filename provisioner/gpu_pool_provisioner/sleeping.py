"""Kernels that may sleep on disk, as their provisioner starts them and leaves them to the next server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jupyter_core.paths import jupyter_data_dir

from gpu_pool_client import Terms
from gpu_pool_client._background import in_background
from gpu_pool_client._log import EscapingLogger
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.environment import is_ipython
from gpu_pool_provisioner.launchers.base import CannotSleepError
from gpu_pool_provisioner.proxy.backend import BackendConnection
from gpu_pool_provisioner.session import State, events, texts
from gpu_pool_provisioner.settings import SliceSettings
from gpu_pool_provisioner.templates import Kind, templates

if TYPE_CHECKING:  # few kernels sleep
    from gpu_pool_provisioner.hibernation.kept import KeptKernel, Program
    from gpu_pool_provisioner.hibernation.left import Owner

#: Why kernels do not sleep here, as far as that was logged: of the process, as the log is.
_logged: Final[set[str]] = set()


class Sleep:
    """What a provisioner does for its kernel to sleep on disk. Nothing of it is loaded for other kernels."""

    def __init__(self, settings: SliceSettings) -> None:
        """Take the provisioner, whose settings hold."""
        self._settings = settings
        #: Whether this start's kernel may, as its settings say.
        self._may = False
        #: Whose it is on disk, where it outlives its server; None where it does not.
        self._owner: Owner | None = None

    @property
    def is_asked_for(self) -> bool:
        """Whether its settings say that it is to."""
        return bool(self._settings.hibernate_after or self._settings.hibernate_with_server)

    @property
    def _program(self) -> Program:
        from gpu_pool_provisioner.hibernation.kept import Program

        said = self._settings
        folder = said.hibernation_folder or str(Path(jupyter_data_dir(), "gpu-pool", "asleep"))
        return Program(said.criu, folder, said.hibernation_mib, said.hibernation_program)

    # -- Whether it can ----------------------------------------------------------

    async def _why_not(self) -> str:
        """Return why no kernel of its kernelspec can sleep here, in a sentence; empty where one can."""
        spec = self._settings.kernel_spec
        if not is_ipython(spec.argv):
            return f"{spec.display_name} is no IPython kernel, and only those can."
        from gpu_pool_provisioner.hibernation.kept import why_not

        by = self._program
        return await asyncio.to_thread(why_not, by.criu, by.installed, by.folder)

    async def _can(self) -> bool:
        """Whether it can here; where it can't, log once why."""
        why = await self._why_not()
        if why:
            self.log_awake(why)
        return not why

    def log_awake(self, why: str) -> None:
        """Log, once, why kernels stay awake that are to sleep on disk."""
        if why not in _logged:
            _logged.add(why)
            EscapingLogger(self._settings.log).warning(texts.STAY_AWAKE, why)

    # -- Its start ---------------------------------------------------------------

    async def begin(self, driver: SessionDriver, notebook: str, *, is_first: bool) -> None:
        """See whether the kernel of a session that begins may sleep, and which one another server has left.

        ``notebook`` is the path of its notebook. After the first start, none is looked for.
        """
        self._may = self.is_asked_for and await self._can()
        if self._may and self._settings.hibernate_with_server and not self._settings.is_unattended:
            await self._find_left(driver, notebook, is_first)

    async def _find_left(self, driver: SessionDriver, notebook: str, is_first: bool) -> None:
        """Let a session begin with the kernel of its notebook that another server has left, if one has."""
        from gpu_pool_provisioner.hibernation.calling import ProgramRefused
        from gpu_pool_provisioner.hibernation.giving_way import told_of
        from gpu_pool_provisioner.hibernation.kept import KeptKernel
        from gpu_pool_provisioner.hibernation.left import Owner, log_not_known

        parent = self._settings.parent
        owner = self._owner = Owner.of(notebook, parent.kernel_name, os.environ)
        driver.outlives_server = owner is not None
        if owner is None or not is_first:
            return
        try:
            kept = await asyncio.to_thread(KeptKernel.claimed, self._program, owner)
            told = "" if kept is not None else await asyncio.to_thread(told_of, self._program, owner)
        except ProgramRefused as error:
            log_not_known(error)
            return
        if kept is not None and kept.image is not None:
            driver.kept, image, now = kept, kept.image, time.time()
            on_disk = events.OnDisk(time.monotonic() - (now - image.record.at), image.mib)
            found = events.LeftFound("\n".join(image.replaced), image.in_words(now), on_disk)
            await in_background(driver.tell(found))
            # Frontends get the key with which the kernel goes on: what they say is relayed as it is.
            parent.session.key = kept.image.record.key.encode()
        elif told:
            await in_background(driver.tell(events.LeftFound(told)))

    async def to_disk(self, terms: Terms) -> events.ToDisk | None:
        """Return how the kernel that is about to begin goes to disk: as the settings say, else as its course.

        None where it is to stay awake.
        """
        after, outlives = float(self._settings.hibernate_after) or None, self._owner is not None
        if after is None and terms.hibernate_after is not None and await self._can():
            return events.ToDisk(terms.hibernate_after, is_by_terms=True, outlives_server=outlives)
        return events.ToDisk(after, outlives_server=outlives) if self._may else None

    async def launch(
        self,
        driver: SessionDriver,
        cmd: list[str],
        kwargs: dict[str, Any],
        variables: dict[str, str],
        backend: BackendConnection,
    ) -> KeptKernel:
        """Launch a kernel that may sleep on disk, or wake one that another server has left; return it.

        ``variables`` are those of its slice. Raises ``CannotSleepError`` where none can be launched and one
        that stays awake can; other ``OSError``, and ``CannotWakeError``.
        """
        from gpu_pool_provisioner.hibernation.kept import KeptKernel
        from gpu_pool_provisioner.hibernation.left import KernelRecord

        connection, image = backend.connection, driver.kept.image if driver.kept is not None else None
        record = None
        if self._owner is not None:
            record = KernelRecord(self._owner, connection["ip"], connection["key"], variables)
        if driver.kept is not None and image is not None:
            kept, before = driver.kept, image.record.variables
            names = {**before, **variables}
            kept.changed = {name: (before.get(name), variables.get(name)) for name in names}
            await kept.wake()
        elif (prepared := await self._prepared(cmd, kwargs)) is not None:
            kept = driver.kept = prepared
        else:
            kept = driver.kept = KeptKernel(self._program)
            try:
                await kept.launch(cmd, kwargs["env"], kwargs.get("cwd"))
            except CannotSleepError as error:
                self.log_awake(str(error))
                driver.kept = None
                raise
        if self._settings.preload is not None:
            kept.note_process = templates().note_kernel
            kept.note_process(kept.pid)
        kept.record = record
        return kept

    async def _prepared(self, cmd: list[str], kwargs: dict[str, Any]) -> KeptKernel | None:
        """Return a prepared kernel; None where it must start cold."""
        if self._settings.preload is None:
            return None
        from gpu_pool_provisioner.prepared import prepared_kernel

        return await prepared_kernel(self._program, cmd, kwargs, self._settings.template_settings())

    async def kind_of_template(self) -> Callable[..., Kind]:
        """Return what finds the kind of template, or prepared kernel, that such kernels have."""
        if not self.is_asked_for or await self._why_not():
            return Kind.of
        from gpu_pool_provisioner.prepared import kind_of

        return partial(kind_of, self._program)

    # -- Its end while it is idle, and that of its server ----------------------------

    def goes_to_disk(self, driver: SessionDriver | None) -> bool:
        """Whether it is on disk, or goes there by itself; not where it works, or has to stay awake."""
        if driver is None or driver.kept is None:
            return False
        is_there = driver.kept.poll() is not None or driver.session.state in (State.HIBERNATING, State.WAKING)
        return is_there or driver.state.idle.sleeps_at is not None

    def leaves_image(self, driver: SessionDriver | None) -> bool:
        """Whether it is to go to disk at its server's end."""
        return driver is not None and driver.kept is not None and self._owner is not None

    def leaves_bytes(self, driver: SessionDriver | None) -> int:
        """Return how many bytes it takes then at most. Blocks."""
        kept = driver.kept if driver is not None else None
        return kept.needs_bytes if kept is not None else 0

    async def leave(self, driver: SessionDriver | None, notebook: str) -> str:
        """Let the next server go on with it; see ``GPUPoolProvisioner.leave_image``."""
        from gpu_pool_provisioner.hibernation.left import Owner

        owner = Owner.of(notebook, self._settings.parent.kernel_name, os.environ)
        if driver is None or driver.kept is None:
            return ""
        if owner is not None and owner != self._owner:
            self._owner = owner
            await in_background(driver.kept.belong_to(owner))
        return await in_background(driver.leave_image())

    async def note_not_left(self, why: str) -> None:
        """Have its notebook told next time that it ended with its server; ``why`` in sentences."""
        from gpu_pool_provisioner.hibernation.giving_way import write_notice

        if self._owner is not None:
            await asyncio.to_thread(write_notice, self._owner, time.time(), "", texts.not_left(why))
