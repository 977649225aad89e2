"""What an administrator can set about a pool.

Read from ``gpu_pool_config.py`` and ``gpu_pool_config.json`` in Jupyter's
configuration directories (``jupyter --paths``), so that every process that
opens the same pool follows the same rules.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from jupyter_core.paths import ENV_CONFIG_PATH, SYSTEM_CONFIG_PATH, jupyter_config_path
from traitlets import Bool, CUnicode, Dict, Enum, Instance, TraitError, Unicode
from traitlets.config import Config, Configurable, ConfigurableError
from traitlets.config.loader import ConfigFileNotFound, JSONFileConfigLoader, PyFileConfigLoader

from gpu_pool.policy.queue_state import Rules
from gpu_pool.policy.sharing import Sharing, read_course, read_group, read_quota
from gpu_pool.tuning import Tuning
from gpu_pool_client import WHOLE, BadRequest, parse_duration
from gpu_pool_client._requests import MAX_COUNT, MAX_MIB
from gpu_pool_client._traits import Number, Seconds, Switch, WholeNumber

_NAME = "gpu_pool_config"


class PoolSettings(Configurable):
    """Settings of a pool, under ``c.PoolSettings`` in ``gpu_pool_config.py``."""

    tuning = Instance(Tuning, (), help="What no configuration sets.")
    context_mib = WholeNumber(
        0,
        min=0,
        max=MAX_MIB,
        help="""Memory in MiB that CUDA itself takes in a process; smaller slices are refused. 0: the value
        for the card, 519 on an H100, 350 where it is not known.""",
    ).tag(config=True)
    unified_memory_mib = WholeNumber(
        0,
        min=0,
        max=MAX_MIB,
        help="""Memory in MiB that is divided of a GPU without memory of its own, such as a GB10's, which uses
        the machine's. 0: all that the machine has.""",
    ).tag(config=True)
    lease_contexts = WholeNumber(
        2,
        min=1,
        max=1_000,
        help="CUDA contexts that a lease may have at once, where MPS limits their number. A process has one.",
    ).tag(config=True)
    compute_overcommit = Number(
        1.0,
        min=1.0,
        max=100.0,
        help="How many times over the compute of a device may be granted. Memory is never overcommitted.",
    ).tag(config=True)
    max_share = Number(
        1.0,
        min=0.001,
        max=1.0,
        help="The largest share of one device that one lease may have, whatever a kernelspec says.",
    ).tag(config=True)
    max_memory_mib = WholeNumber(
        0,
        min=0,
        max=MAX_MIB,
        help="The most memory in MiB that one lease may have on one device; 0 for no limit.",
    ).tag(config=True)
    max_devices = WholeNumber(
        0, min=0, max=MAX_COUNT, help="The most devices that one lease may have; 0 for no limit."
    ).tag(config=True)
    max_waiting = WholeNumber(
        100,
        min=0,
        max=1_000_000,
        help="""The most leases of one user that may wait at the same time; 0 for no limit. The pool is made
        for up to 1,000 waiting leases of all users together; beyond that nobody is refused, but every
        decision takes longer in proportion.""",
    ).tag(config=True)
    attach_within = Seconds(
        120.0,
        min=1.0,
        help="Seconds in which a process must be attached to a granted lease before it ends.",
    ).tag(config=True)
    enforced_within = Seconds(
        60.0,
        min=0.1,
        max=90.0,
        help="""Seconds in which a slice's limits must be in force, for instance by an MPS daemon. After
        that its lease ends as not-enforced. Clients of gpu-pool serve wait for 100 seconds.""",
    ).tag(config=True)
    tier = Unicode(
        "auto",
        help="""How slices are enforced: accounting, mps, cgroups, hami, or a tier of another package by its
        name. auto is the strictest that needs no preparation by the administrator.""",
    ).tag(config=True)
    device_names = Enum(
        ("uuid", "index"),
        "uuid",
        help="""How CUDA_VISIBLE_DEVICES names the GPUs of a slice. index: by number, with
        CUDA_DEVICE_ORDER=PCI_BUS_ID, for programs that read integers from it; MIG instances, GPUs shared
        by MPS, and what runs in containers keep the uuid.""",
    ).tag(config=True)
    probe_user = Unicode(
        "nobody",
        help="""The user as whom gpu-pool serve, run by root, tries to evade the limits of a device before it
        calls them hard. Name one who may do what a student may.""",
    ).tag(config=True)
    hami_library = Unicode(
        "/usr/local/vgpu/libvgpu.so", help="Where HAMi-core's library is, for c.PoolSettings.tier = 'hami'."
    ).tag(config=True)
    runtime_dir = Unicode(
        "",
        help="A folder on a local disk for files that are needed until the machine restarts. Empty: "
        "/run/gpu-pool for root, otherwise a folder of the user's own.",
    ).tag(config=True)
    watchdog = Enum(
        ("auto", "off", "warn", "end"),
        "auto",
        help="""What happens to a lease that uses more memory than granted: warn its user, or also
        interrupt and end its processes. auto: end in gpu-pool serve, off elsewhere.""",
    ).tag(config=True)
    watchdog_share = Number(
        0.05, min=0.0, max=1_000.0, help="The tolerated excess, as a fraction of the memory granted."
    ).tag(config=True)
    watchdog_mib = WholeNumber(
        64, min=0, max=MAX_MIB, help="The tolerated excess in MiB, if that is more."
    ).tag(config=True)
    watchdog_after = Seconds(
        10.0, min=0.0, help="Seconds of using too much memory before the user is warned."
    ).tag(config=True)
    interrupt_after = Seconds(
        30.0, min=0.0, help="Seconds from the warning until the process is interrupted; 0 for never."
    ).tag(config=True)
    end_after = Seconds(
        60.0, min=0.0, help="Seconds from then until its processes are ended; 0 for never."
    ).tag(config=True)
    burst_after = Seconds(
        5.0,
        min=0.0,
        help="""Seconds in which a lease gives up what it uses on top of its guarantee, once others need that,
        before its user is warned.""",
    ).tag(config=True)
    burst_interrupt_after = Seconds(
        10.0, min=0.0, help="Seconds from that warning until the process is interrupted; 0 for never."
    ).tag(config=True)
    burst_end_after = Seconds(
        20.0, min=0.0, help="Seconds from then until its processes are ended; 0 for never."
    ).tag(config=True)
    end_unmanaged = Bool(
        False,
        help="""Whether processes that use a device of the pool without a lease are ended after a minute.
        Those of root and display servers never are.""",
    ).tag(config=True)
    look_every = Seconds(
        1.0, min=0.1, max=60.0, help="Seconds between two measurements of what uses the devices."
    ).tag(config=True)

    checkpoint = Switch(
        help="""Whether idle kernels that hold device memory are parked, too, by moving it to host memory
        with CUDA checkpoint: auto (where it is known to work, see gpu-pool doctor), on (also where it is not
        known to), or off. Needs driver 570 or newer and jupyter-gpu-pool[checkpoint].""",
    ).tag(config=True)
    checkpoint_under_mps = Bool(
        False,
        help="Whether that is done on devices shared by MPS, too; only once it has been seen to work there.",
    ).tag(config=True)
    checkpoint_host_mib = WholeNumber(
        0,
        min=0,
        max=MAX_MIB,
        help="""Host memory in MiB for all parked kernels together; 0 for a quarter of the machine's, or of
        the limit of the pool's own cgroup.""",
    ).tag(config=True)

    history_days = WholeNumber(
        400,
        min=1,
        max=36_500,
        help="""Days for which leases that have ended are kept one by one: 400 let a year be reported.
        After that, and of each user's leases beyond the last 10,000, sums by day, user, course and reason
        remain.""",
    ).tag(config=True)
    audit_log = Unicode(
        "",
        help="A file to which a line of JSON is appended for each decision, with who asked; empty for none.",
    ).tag(config=True)

    courses = Dict(
        help="""Course name to its settings: weight, priority, longest_lease, idle_limit, yield_after,
        when_idle, warn_before, keep_at_most, hibernate_after, quota and per_user (of these: slices,
        share, memory, gpu_hours_per_week, gpu_hours_per_term).""",
    ).tag(config=True)
    courses_dir = Unicode(
        "", help="A folder of course files, NAME.yaml, which teachers write; empty for none."
    ).tag(config=True)
    course_required = Bool(False, help="Whether requests must name a course.").tag(config=True)
    default_course = Dict(help="The same settings for requests that name no course.").tag(config=True)
    groups = Dict(help="Group name to its users (a list), their quota together and their priority.").tag(
        config=True
    )
    per_user = Dict(help="The quota of each user over all courses.").tag(config=True)
    drain_after = CUnicode(
        "30min", help="How long a request waits before devices are reserved for it: 30min, 2h, 90s."
    ).tag(config=True)
    term_began = Unicode(
        "", help="First day of the term, such as 2026-09-01, from which gpu_hours_per_term count."
    ).tag(config=True)

    #: Whether kernels run in pods that the pool starts, and whether these go on while their slices are lent.
    #: Nobody sets it: it follows from what is served.
    in_pods = pods_park = False

    @property
    def asks_courses(self) -> bool:
        """Whether courses are asked before anything is granted."""
        return bool(self.courses_dir or self.course_required)

    @property
    def sharing(self) -> Sharing:
        """How the pool is shared. Raises ``BadRequest`` that names what is wrong with it."""
        return Sharing(
            courses={name: read_course(name, settings) for name, settings in self.courses.items()},
            default=read_course("", self.default_course),
            groups=tuple(read_group(name, settings) for name, settings in self.groups.items()),
            per_user=read_quota(self.per_user, "per_user"),
            drain_after=parse_duration(self.drain_after),
            in_pods=self.in_pods,
            pods_park=self.pods_park,
        )

    @property
    def term_start(self) -> float:
        """The Unix time of the first day of the term (local midnight), 0 if none is set."""
        if not self.term_began:
            return 0.0
        try:
            return datetime.fromisoformat(self.term_began).timestamp()
        except ValueError:
            raise BadRequest(
                f"term_began is {self.term_began[:40]!a}.", "Accepted: a date such as 2026-09-01."
            ) from None

    @property
    def keep_history(self) -> float:
        """Seconds for which leases that have ended are kept one by one."""
        return float(self.history_days) * 86_400

    @property
    def rules(self) -> Rules:
        """What placement and admission need of these settings."""
        return Rules(
            context_mib=self.context_mib,
            lease_contexts=self.lease_contexts,
            device_milli=round(self.compute_overcommit * WHOLE),
            max_milli=round(self.max_share * WHOLE),
            max_memory_mib=self.max_memory_mib,
            max_devices=self.max_devices,
        )


def config_folders() -> list[str]:
    """Return the folders of Jupyter's configuration, the user's first; for who has no home, all others."""
    try:
        return jupyter_config_path()
    except RuntimeError:
        named = os.environ.get("JUPYTER_CONFIG_PATH", "").split(os.pathsep)
        return [*filter(None, named), *ENV_CONFIG_PATH, *SYSTEM_CONFIG_PATH]


def load_settings() -> PoolSettings:
    """Read the settings from Jupyter's configuration directories.

    Raises ``BadRequest`` that names the file, or the setting, that cannot be understood.
    """
    merged = load_config()
    try:
        settings = PoolSettings(config=merged)
    except (TraitError, ConfigurableError) as error:
        raise BadRequest(f"A setting in {_NAME} is wrong: {error}") from error
    # Read now, so that what is wrong with them is said before anything is granted.
    _ = settings.sharing, settings.term_start
    return settings


def load_config(*names: str) -> Config:
    """Read what stands in Jupyter's configuration directories; by default in the files of this package.

    ``names`` are those of files without their ending. Raises ``BadRequest`` that names the file.
    """
    merged = Config()
    for folder in reversed(config_folders()):
        for name in names or (_NAME,):
            for loader in (
                PyFileConfigLoader(f"{name}.py", path=folder),
                JSONFileConfigLoader(f"{name}.json", path=folder),
            ):
                merged.merge(_load(loader, Path(folder)))
    return merged


def _load(loader: PyFileConfigLoader | JSONFileConfigLoader, folder: Path) -> Config:
    try:
        return loader.load_config()
    except ConfigFileNotFound:
        return Config()
    except (Exception, SystemExit) as error:
        raise BadRequest(
            f"{folder / loader.filename} cannot be read: {type(error).__name__}: {error}.",
            "Correct it, or move it away.",
        ) from error
