"""What can be configured: in a kernelspec, or as ``GPUPoolProvisioner`` in the server's configuration.

And what follows from that before anything is asked for: which slice of which pool, and in whose name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any, Final

from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Bool, CUnicode, List, Unicode, default

from gpu_pool_client import Holder, Process, SliceRequest
from gpu_pool_client._pool import BATCH_VARIABLE, COURSE_VARIABLE, DEFAULT_URL, URL_VARIABLE, is_yes
from gpu_pool_client._processes import account_of
from gpu_pool_client._requests import MAX_MIB
from gpu_pool_client._traits import Seconds, WholeNumber
from gpu_pool_provisioner.templates import TemplateSettings

#: Names the slice of kernels whose kernelspec says nothing about one.
DEFAULT_SLICE_VARIABLE: Final = "GPU_POOL_DEFAULT_SLICE"
#: Seconds for which a kernel waits for a pool that is away: behind a JupyterHub as long as it takes to
#: move the service to another machine, elsewhere as long as it takes to restart it.
_BEHIND_HUB, _ELSEWHERE = 300.0, 10.0
#: Owners of a kernel's manager that nobody sits in front of, by name: looking for one imports nothing. The
#: second is the first, started with ``python -m``.
_UNATTENDED: Final = {"jupyter_client.runapp.RunApp", "__main__.RunApp"}
_WHERE: Final = "It is set in the kernel's kernel.json\nor the server's configuration."


#: Characters of a user's or kernel's name that are kept, as a pool does.
_LONGEST_NAME: Final = 200


def default_outage_timeout() -> float:
    """Return for how many seconds a kernel waits for a pool that is away, where nobody has set that."""
    return _BEHIND_HUB if os.environ.get("JUPYTERHUB_API_TOKEN") else _ELSEWHERE


def nobody_watches(manager: object) -> bool:
    """Whether a kernel's manager has no owner, or one that runs what it was given and ends."""
    owner = getattr(manager, "parent", None)
    if owner is None:
        return True
    while owner is not None:
        if any(f"{kind.__module__}.{kind.__qualname__}" in _UNATTENDED for kind in type(owner).__mro__):
            return True
        owner = getattr(owner, "parent", None)
    return False


class SliceSettings(LocalProvisioner):
    """A provisioner that has the settings of a slice, and asks for none."""

    #: The kernel manager. jupyter_client gives every provisioner one.
    parent: Any

    slice = CUnicode(
        config=True,
        help="""The slice of a GPU a kernel gets, such as 2%, 1.5GiB, 2x50% or 4 (whole GPUs); empty for none.

        Set in a kernelspec: metadata.kernel_provisioner.config.slice. Kernels
        whose kernelspec says nothing get the slice of $GPU_POOL_DEFAULT_SLICE.
        Whatever is asked for, the pool's rules decide.
        """,
    )
    pool_url = Unicode(
        config=True,
        help="""The URL of the pool. Empty: $GPU_POOL_URL, or else this machine's own pool, embedded:

        A kernelspec may name another pool than the server's configuration
        does. The pool at that URL decides by its own rules.
        """,
    )
    course = Unicode(
        config=True,
        help="The course in whose name slices are asked for. Empty: $GPU_POOL_COURSE, or else none.",
    )
    kernel_proxy = Bool(
        True,
        config=True,
        help="""Whether a kernel for which no slice is free starts all the same, and waits in the queue.

        Its first cell shows its position in the queue and runs once it has its slice. If
        false, the start fails after wait_timeout (or unattended_wait, see there).
        """,
    )
    wait_timeout = Seconds(
        5.0,
        min=0,
        max=30,
        config=True,
        where=_WHERE,
        help="""Seconds to wait for a slice before a start fails, where kernel_proxy is false. At most 30:

        a start that waits can be neither seen nor cancelled in JupyterLab.
        """,
    )
    unattended = Bool(
        None,
        allow_none=True,
        config=True,
        help="""Whether nobody watches the kernel: then its start waits for its slice, not its first cell.

        By default that is found out: nobody watches a kernel whose manager has no
        parent, as of nbclient, papermill, nbconvert, jupyter-scheduler and nbgrader, or
        whose parent is ``jupyter run``. Jupyter's servers and consoles are their
        manager's parent.
        """,
    )
    unattended_wait = Seconds(
        3600.0,
        min=0,
        max=604_800,
        config=True,
        where=_WHERE,
        help="""Seconds for which the start of a kernel that nobody watches waits for its slice.

        By default an hour, at most 604800. After that, and with 0 at once if nothing
        is free, the start fails. How the queue stands is written into the program's log meanwhile.
        """,
    )
    batch = Bool(
        config=True,
        help="""Whether kernels are batch work, which comes after all that is not.

        For graders and scheduled notebooks. By default what $GPU_POOL_BATCH says: 1 or
        true for yes. A course may say so as well.
        """,
    )
    outage_timeout = Seconds(
        300.0,
        min=0,
        max=86_400,
        config=True,
        where=_WHERE,
        help="""Seconds for which a kernel that starts, or restarts, waits for a pool that does not answer.

        By default 300 behind a JupyterHub, as long as it takes to move the pool's
        service to another machine, and else 10. At most 86400; with 0 the start
        fails at once. The first cell shows that it waits, and for how long.
        """,
    )
    ready_timeout = Seconds(
        120.0,
        min=1,
        max=3600,
        config=True,
        where=_WHERE,
        help="""Seconds in which a kernel must answer once it has been launched. At most 3600.

        A kernel that does not is ended, and its slice goes back to the pool.
        Twice what Jupyter's own programs wait for, so that nothing is ended
        that somebody still waits for.
        """,
    )
    start_timeout = Seconds(
        86_400.0,
        min=1,
        max=86_400,
        config=True,
        where=_WHERE,
        help="""Seconds in which a kernel's pod must run, where the pool runs kernels in pods. At most 86400.

        For who wants to wait less than the pool lets them: its administrator
        sets c.KubernetesSettings.start_within, 600 by default. ready_timeout
        counts from then on. What is going on is shown in the first cell.
        """,
    )
    pod_argv = List(
        Unicode(),
        config=True,
        help="""The kernel's command in a pod, where it is not the one of its kernelspec.

        {connection_file} stands for the connection file. By default it is the
        kernelspec's, with its program found by its name, and python3 for any Python.
        """,
    )
    pod_environment = List(
        Unicode(),
        config=True,
        help="""Names of variables of this server that a kernel in a pod has, too. By default none.

        A pod has the variables of the kernelspec (env) in any case. Of this
        server's it has no others, since tokens are among them.
        """,
    )
    restart_grace = Seconds(
        10.0,
        min=0,
        max=300,
        config=True,
        where=_WHERE,
        help="""Seconds for which a kernel that died keeps its slice, so that it can be restarted on it.

        At most 300: nobody else can use the slice meanwhile.

        Used where kernels are restarted automatically, as JupyterLab does:
        it looks for dead kernels every 3 seconds.
        """,
    )
    hibernate_after = Seconds(
        0.0,
        min=0,
        max=30 * 86_400,
        config=True,
        where=_WHERE,
        help="""Seconds without work after which a kernel sleeps on disk until its next cell. 0: as its course

        says, and without that never. Its slice goes back to the pool, its memory to the machine; the next
        cell wakes it, with its variables. For IPython kernels, with CRIU 4.1 or newer: of a server that runs
        as root, or whose user may call hibernation_program. At most 2592000. See "Kernels that sleep on
        disk" in the documentation.
        """,
    )
    hibernate_with_server = Bool(
        config=True,
        help="""Whether idle kernels go to disk when their Jupyter server is stopped, and go on with the next.

        A notebook that is opened again with the same kernel then shows what is there, and its first cell goes
        on with it; a restart starts afresh. For the same kernels as hibernate_after. What nobody has asked
        for in 7 days is removed. By default kernels end with their server.
        """,
    )
    hibernation_program = Unicode(
        "/usr/local/libexec/gpu-pool-hibernation",
        config=True,
        help="""The program that puts kernels of other users than root to disk, by sudo. Its own settings

        say which CRIU that is by, where, and how much. See "Hibernation for every user" in the documentation.
        """,
    )
    criu = Unicode("criu", config=True, help="What writes root's kernels to disk: CRIU's name, or its path.")
    hibernation_folder = Unicode(
        config=True,
        help="Where root's kernels sleep: a folder on a disk. Empty: gpu-pool/asleep in Jupyter's data.",
    )
    hibernation_mib = WholeNumber(
        0,
        min=0,
        max=MAX_MIB,
        config=True,
        help="""MiB that all kernels which sleep in that folder of root's may take. One for which there is

        no room left stays awake, and says so. 0: as much as the disk has.
        """,
    )

    contact = Unicode(
        "the person who runs this Jupyter server",
        config=True,
        help="Who a student should ask when no slice is free, in words that end a sentence. May be empty.",
    )

    preload = List(
        Unicode(),
        None,
        allow_none=True,
        config=True,
        help="""Modules that an IPython kernel has imported when it starts, such as numpy and torch.

        By default kernels start without.

        Where this is set, if only to [], the second kernel and every later one are
        forked from a process of this server that has imported these modules: a warm
        kernel. What differs between kernels, such as environment and random numbers,
        differs here, too; whatever is in doubt starts as always. See "Warm kernels" in
        the documentation. A kernel that may sleep on disk is not forked: the server keeps
        one process that has imported them, and that becomes the next such kernel.
        """,
    )
    preload_with_server = Bool(
        False,
        config=True,
        help="""Whether they are imported as soon as the Jupyter server has started.

        Then the first kernel has them as well. It takes their memory even if no kernel
        is started. By default they are imported after the first kernel that needs them has started.
        """,
    )
    max_templates = WholeNumber(
        4,
        min=0,
        max=64,
        config=True,
        help="How many processes this server keeps from which warm kernels are forked, or that become one. "
        "At most 64.",
    )
    max_template_mib = WholeNumber(
        4096,
        min=1,
        max=MAX_MIB,
        config=True,
        help="MiB of memory that such a process may take. With a larger one, kernels start as always.",
    )
    template_idle_timeout = Seconds(
        3600.0,
        min=1,
        max=7 * 86_400,
        config=True,
        where=_WHERE,
        help="Seconds without a new kernel after which such a process ends. At most 604800.",
    )

    @default("outage_timeout")
    def _default_outage_timeout(self) -> float:
        return default_outage_timeout()

    @default("slice")
    def _default_slice(self) -> str:
        return self._variable(DEFAULT_SLICE_VARIABLE)

    @default("batch")
    def _default_batch(self) -> bool:
        return is_yes(self._variable(BATCH_VARIABLE))

    #: The file name of the notebook that uses the kernel, as its Jupyter server says; empty where it is not
    #: known.
    notebook = ""

    @property
    def url(self) -> str:
        """The URL of the pool that such a kernel asks."""
        return self.pool_url or self._variable(URL_VARIABLE) or DEFAULT_URL

    def holder(self) -> Holder:
        """Return who asks for the slice: the user of this process, with names as a pool keeps them."""
        name = purpose(self.notebook, self.kernel_spec.display_name, str(self.kernel_id))
        user = printable(account_of(os.getuid()))
        return Holder(user, self.course_name, name, Process.current(), self.batch, yields=True)

    @property
    def course_name(self) -> str | None:
        """The course in whose name the slice is asked for; None for none."""
        return self.course or self._variable(COURSE_VARIABLE) or None

    @property
    def is_unattended(self) -> bool:
        """Whether nobody watches the kernel, by the setting or else by who manages it.

        Jupyter's servers and consoles make a kernel's manager their child. Programs that run
        notebooks do not, and ``jupyter run``, which does, counts a file's time as they count a cell's.
        """
        if self.unattended is not None:
            return bool(self.unattended)
        return nobody_watches(self.parent)

    def template_settings(self) -> TemplateSettings:
        """Return what the processes are like from which warm kernels are forked."""
        return TemplateSettings(
            tuple(self.preload), self.max_templates, self.max_template_mib, self.template_idle_timeout
        )

    def _variable(self, name: str) -> str:
        """Return a variable as the kernel will have it: its kernelspec's (``env``), or else this server's.

        What stands in ``${...}`` is put in from this server's, as Jupyter does. Empty if it is not set.
        """
        stanza = getattr(self.kernel_spec, "env", None) or {}
        if name in stanza:
            return Template(str(stanza[name])).safe_substitute(os.environ)
        return os.environ.get(name, "")


def kernel_name(display_name: object, most: int = _LONGEST_NAME) -> str:
    """Return a kernel's name as a sentence has it: printable, and ``Python 3 (GPU  2%)`` with one space.

    Kernelspecs of old have a second one, for the order in Jupyter's lists.
    """
    return printable(str(display_name).replace("  ", " "), most)


#: By which a Jupyter server tells a kernel of the notebook, or console, that it was started for.
SESSION_VARIABLE: Final = "JPY_SESSION_NAME"
_LONGEST_NOTEBOOK: Final = 80


def purpose(notebook: str, name: object, kernel_id: str) -> str:
    """Return what a slice is for, as others see it: ``week1.ipynb: Python 3 (GPU 2%) [5f0a1b2c]``.

    ``notebook`` is empty where it is not known.
    """
    kernel = f"{kernel_name(name, 180 - len(notebook))} [{kernel_id[:8]}]"
    return f"{notebook}: {kernel}" if notebook else kernel


def notebook_of(environment: Mapping[str, str], own: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the name of the notebook that a kernel with this environment is for, without its folder.

    Empty where it is not known: what ``own`` has, the environment of whoever starts it, is another kernel's.
    """
    path = environment.get(SESSION_VARIABLE, "")
    return "" if path == own.get(SESSION_VARIABLE) else printable(Path(path).name, _LONGEST_NOTEBOOK)


def name_on_size(name: str, started: SliceRequest, now: SliceRequest) -> str:
    """Return what a kernel is called that was ``started`` on one size and is on another ``now``.

    ``Python 3 (GPU 2%)`` becomes ``Python 3 (GPU 10%)``; a name that does not tell the size stays as it is.
    """
    return name.replace(started.title, now.title)


def printable(text: object, most: int = _LONGEST_NAME) -> str:
    """Return ``text`` cut to ``most`` characters, with a space for what cannot be shown.

    That is a line's end, a control character, or half a surrogate pair (as JSON can hold).
    """
    return "".join(sign if sign.isprintable() else " " for sign in str(text)[:most])
