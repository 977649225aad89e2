"""The kernels that a course offers, shown by its servers without being installed for anybody.

A notebook server whose ``ServerApp.kernel_spec_manager_class`` this is shows, besides the
kernels that are installed, one on every slice of ``GPU_POOL_KERNELS`` over every
kernel of Python, as ``gpu-pool kernels install`` makes them. Where the server is for a
course, the slices are those that the course offers now, as the pool says when it is
asked: by whoever looks at the kernels, every few seconds at most.

It stands here and not with the provisioner because it makes kernelspecs, and that is
this package's business; it runs in the server, and needs nothing of the Hub.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel
from traitlets import Bool, Float, Instance, List, Type, Unicode, default

from gpu_pool_client import Holder, SliceRequest, connect, parse_request
from gpu_pool_client._folders import HeldFolder
from gpu_pool_client._log import EscapingLogger
from gpu_pool_client._pool import COURSE_VARIABLE, DEFAULT_URL, URL_VARIABLE
from gpu_pool_client._processes import account_of
from gpu_pool_kernels.installer import (
    MARKER,
    PROVISIONER,
    RESOURCE_DIR,
    can_preload,
    kernel_json,
    provisioner_of,
    write_kernel,
)
from gpu_pool_kernels.naming import by_size, folder_name

#: Lists slices as JSON: ``["2%", "10%"]``. Without it, nothing is added and nothing hidden.
KERNELS_VARIABLE: Final = "GPU_POOL_KERNELS"

#: What IPython kernels on these slices have imported when they start, as JSON: ``{"modules": ["numpy"]}``,
#: and with ``"with_server": "2%"`` for which slice that is prepared when the server starts.
PRELOAD_VARIABLE: Final = "GPU_POOL_PRELOAD"

#: How the names of the folders begin in which the kernels on slices are written.
_FOLDER: Final = "gpu-pool-kernels-"

#: A kernelspec as managers list it: its ``resource_dir``, and its content as ``spec``.
_Entry = dict[str, Any]


class OfferedKernels(KernelSpecManager):
    """Shows the kernels of another manager, and those on the slices that are offered.

    Installed kernels on slices are hidden: which there are is the course's to say.
    """

    inner_class = Type(
        KernelSpecManager,
        klass=KernelSpecManager,
        help="The manager that finds the installed kernels, such as nb_conda_kernels.CondaKernelSpecManager.",
    ).tag(config=True)
    bases = List(
        Unicode(), help="The kernels that are offered on slices, by name; by default all Python kernels."
    ).tag(config=True)
    other_kernels = Bool(True, help="Whether kernels without a slice are shown, too.").tag(config=True)
    ask_every = Float(
        5.0, min=0.0, help="Seconds for which the pool's answer to what the course offers holds."
    ).tag(config=True)
    first_answer_within = Float(
        1.0,
        min=0.0,
        help="""Seconds for which the first answer is waited for, and with it the server. Any other serves
        whoever asks next.""",
    ).tag(config=True)
    inner = Instance(KernelSpecManager, help="A manager of ``inner_class``.")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: None where nothing is said of slices; then this is the inner manager, and nothing else.
        self._slices = self._read_slices()
        self._preload, self._with_server = self._read_preload()
        #: A server's extension looks in a thread, and everybody else on its event loop.
        self._lock = threading.Lock()
        self._course = self._followed()
        #: Where it writes; None before it has anything to write.
        self._held: HeldFolder | None = None
        if self._slices is not None:
            self.kernel_dirs = []
        #: What has been written, by base: the base and the slices as they were then, and what was made.
        self._made: dict[str, tuple[_Entry, list[SliceRequest], dict[str, _Entry]]] = {}

    @default("inner")
    def _inner_default(self) -> KernelSpecManager:
        return self.inner_class(parent=self.parent)

    def get_all_specs(self) -> dict[str, Any]:
        """Return all kernelspecs by name, as the class that this extends does."""
        found = self.inner.get_all_specs()
        if self._slices is None:
            return found
        plain = {name: entry for name, entry in found.items() if not _is_on_slice(entry["spec"])}
        with self._lock:
            offered = self._offered(plain)
        return {**plain, **offered} if self.other_kernels else offered

    def find_kernel_specs(self) -> dict[str, str]:
        """Return the folders of all kernelspecs by name."""
        return {name: entry["resource_dir"] for name, entry in self.get_all_specs().items()}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return one kernelspec. Raises ``NoSuchKernel`` for one that is not shown."""
        specs = self.get_all_specs()
        # Jupyter's own names are in lower case; other managers' need not be, nor what is made of them.
        name = next((each for each in (kernel_name, kernel_name.lower()) if each in specs), None)
        if name is None:
            raise NoSuchKernel(kernel_name)
        entry = specs[name]
        if self._slices is not None and _is_on_slice(entry["spec"]):
            return self.kernel_spec_class(resource_dir=entry["resource_dir"], **entry["spec"])
        return self.inner.get_kernel_spec(name)

    def _offered(self, plain: Mapping[str, _Entry]) -> dict[str, _Entry]:
        """Return the kernelspecs on slices; those over a base that is as it was are not made again."""
        slices = self._slices or []
        if self._course is not None:
            slices = self._slices = sorted(self._course.now(), key=by_size)
        try:
            kernels = self._kernels()
        except OSError as error:
            EscapingLogger(self.log).warning("No kernel can be offered on slices: %s", error)
            return {}
        made = {
            name: self._over(name, entry, slices, kernels)
            for name, entry in plain.items()
            if self._is_base(name, entry)
        }
        self._made = {name: (plain[name], slices, entries) for name, entries in made.items()}
        offered = {name: entry for entries in made.values() for name, entry in entries.items()}
        # Remove what is not offered any more, so that no kernel names it as the next larger one.
        with suppress(OSError):  # it is gone just now, and made again at the next look
            for folder in kernels.iterdir():
                if folder.name not in offered:
                    shutil.rmtree(folder, ignore_errors=True)
        return offered

    def _kernels(self) -> Path:
        """Return the folder of the kernelspecs. Raises ``OSError`` where there can be none.

        It is another one once somebody, such as a cleaner of temporary files, has removed it, and in a
        forked child, since that one is its parent's.
        """
        if self._held is None or not self._held.close.alive or not Path(self._held.path).is_dir():
            self._made = {}
            self._held = HeldFolder(tempfile.gettempdir(), _FOLDER)
            # Where a kernel looks for the next larger one, too.
            self.kernel_dirs = [f"{self._held.path}/kernels"]
        kernels = Path(self._held.path, "kernels")
        kernels.mkdir(exist_ok=True)
        return kernels

    def _is_base(self, name: str, entry: _Entry) -> bool:
        spec = entry["spec"]
        is_wanted = name in self.bases if self.bases else spec.get("language", "").lower() == "python"
        return is_wanted and provisioner_of(spec) in (None, "local-provisioner")

    def _over(self, base: str, entry: _Entry, slices: list[SliceRequest], kernels: Path) -> dict[str, _Entry]:
        known, made_of, entries = self._made.get(base, (None, [], {}))
        if (known, made_of) == (entry, slices) and all(map(_is_there, entries.values())):
            return entries
        try:
            return dict(self._make(base, entry, size, kernels) for size in slices)
        except OSError as error:
            EscapingLogger(self.log).warning("The kernel %s cannot be offered on slices: %s", base, error)
            return {}

    def _make(self, base: str, entry: _Entry, size: SliceRequest, kernels: Path) -> tuple[str, _Entry]:
        name, spec = folder_name(base, size), entry["spec"]
        preload = self._preload if can_preload(spec) else None
        with_server = preload is not None and size == self._with_server
        # A script that starts the kernel stays where it is: nothing may be executed in some folders for
        # temporary files.
        in_place = [word.replace(RESOURCE_DIR, entry["resource_dir"]) for word in spec["argv"]]
        content = kernel_json(
            {**spec, "argv": in_place}, base, size, preload=preload, with_server=with_server
        )
        write_kernel(kernels / name, base, Path(entry["resource_dir"]), content, size)
        return name, {"resource_dir": str(kernels / name), "spec": content}

    def _followed(self) -> CourseOffers | None:
        """Return the course that is followed; None for a server of none, or that has a slice itself."""
        course = os.environ.get(COURSE_VARIABLE)
        if not course or not self._slices:
            return None
        url = os.environ.get(URL_VARIABLE) or DEFAULT_URL
        return CourseOffers(self._slices, url, course, self.log, self.ask_every, self.first_answer_within)

    def _read_slices(self) -> list[SliceRequest] | None:
        text = os.environ.get(KERNELS_VARIABLE)
        if text is None:
            return None
        try:
            return sorted((parse_request(str(each)) for each in json.loads(text)), key=by_size)
        except (ValueError, TypeError) as error:  # BadRequest is a ValueError
            EscapingLogger(self.log).warning(
                "%s is not a list of slices in JSON, so no slices are offered: %s", KERNELS_VARIABLE, error
            )
            return []

    def _read_preload(self) -> tuple[list[str] | None, SliceRequest | None]:
        """Return the modules, and the slice for which they are prepared with the server."""
        text = os.environ.get(PRELOAD_VARIABLE)
        if not text:
            return None, None
        try:
            told = json.loads(text)
            size = told.get("with_server")
            return [str(name) for name in told["modules"]], parse_request(size) if size else None
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            EscapingLogger(self.log).warning(
                "%s cannot be read, so nothing is preloaded: %r", PRELOAD_VARIABLE, error
            )
            return None, None


def _is_there(entry: _Entry) -> bool:
    return Path(entry["resource_dir"], "kernel.json").exists()


def _is_on_slice(spec: Mapping[str, Any]) -> bool:
    return MARKER in spec["metadata"] or provisioner_of(spec) == PROVISIONER


#: Seconds for which a pool that gave no answer is left alone.
_LATER: Final = 60.0


class CourseOffers:
    """The slices that a course offers now, as far as its pool says; else those of before.

    Parameters
    ----------
    known:
        What it offered when the server was started.
    url:
        The pool's.
    course:
        Its name.
    every:
        Seconds for which an answer of the pool holds.
    first_within:
        Seconds for which the first answer is waited for.
    """

    def __init__(
        self,
        known: Sequence[SliceRequest],
        url: str,
        course: str,
        log: logging.Logger,
        every: float,
        first_within: float,
    ) -> None:
        self._known = tuple(known)
        self._url = url
        self._course = course
        self._log = log
        #: Set while nobody asks.
        self._answered = threading.Event()
        self._answered.set()
        self._next = 0.0
        self._every = every
        self._first_wait = first_within

    def now(self) -> tuple[SliceRequest, ...]:
        """Return the slices as they are known, and have the pool asked anew if that is due.

        Only the first call waits for the answer, for a moment at most: the server's event loop,
        and with it everybody's kernels, waits for whoever calls this.
        """
        if self._answered.is_set() and time.monotonic() >= self._next:
            self._answered.clear()
            # In a thread of its own, since an event loop runs in this one; and nobody waits for it
            # when the server ends.
            threading.Thread(target=self._ask, name="gpu-pool-offers", daemon=True).start()
            self._answered.wait(self._first_wait)
            self._first_wait = 0.0
        return self._known

    def _ask(self) -> None:
        pause = self._every
        try:
            found = asyncio.run(self._offers())
            if found is not None:
                self._known = found
        except Exception as error:  # noqa: BLE001 - whatever it is, the kernels of before are shown
            pause = _LATER
            EscapingLogger(self._log).warning(
                "The pool did not say what %s offers now: %.300s", self._course, error
            )
        finally:
            self._next = time.monotonic() + pause
            self._answered.set()

    async def _offers(self) -> tuple[SliceRequest, ...] | None:
        async with connect(self._url) as pool:
            return await pool.offers(Holder(account_of(os.getuid()), self._course))
