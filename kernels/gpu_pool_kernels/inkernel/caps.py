"""Memory limits of the frameworks that read none from the environment: old torch, and TensorFlow.

A finder in front of ``sys.meta_path`` waits for one module of each. Its own
loader executes the module, and then a limit is left with it, which is set when
the framework begins to use the GPU: until then ``%gpu use`` and the user may
change it. Nothing is imported here, and no GPU is touched. Whatever fails costs
the limit and one line, never the user's import.
"""

import contextlib
import os
import sys
import threading
from typing import Any, Iterator, Mapping  # noqa: UP035 - not generic elsewhere in Python 3.6

#: What each may take of each device, as the launcher of the kernel says it: a share, ``0.01083``, and MiB.
VARIABLES = {"torch": "GPU_POOL_TORCH_FRACTION", "tensorflow": "GPU_POOL_TENSORFLOW_MIB"}
UNLIMITED = (
    "gpu-pool: {} gets no memory limit in this kernel ({}). "
    "Keep it within your slice: others have the rest of this GPU."
)
#: Set where the slice has a limit above what is granted.
BURST = "GPU_POOL_LIMIT_MIB"
#: By how much two limits of torch are the same.
CLOSE = 1e-4
LATE = "{} has begun to use the GPU and keeps its old memory limit until the kernel is restarted."


def watch() -> None:
    """Limit the frameworks from now on; one that is imported already, at once. May be repeated."""
    if watching() is not None:
        return
    sys.meta_path.insert(0, Finder())
    for name, limit in LIMITS.items():
        module = sys.modules.get(name)
        if module is not None:
            limit(module)


def watching() -> "Finder | None":
    """Return the finder that waits for the frameworks; None before :func:`watch`."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def too_late(changed: "Mapping[str, object]") -> "list[str]":
    """Return the frameworks that no longer follow a change of these variables.

    Where more than the slice may be used, torch does: see ``burst``.
    """
    finder = watching()
    settled = set() if finder is None else finder.settled - ({"torch"} if BURST in os.environ else set())
    return [name for name, variable in VARIABLES.items() if variable in changed and name in settled]


def failures() -> "dict[str, str]":
    """Return the frameworks to which no limit could be given, and why."""
    finder = watching()
    return {} if finder is None else finder.failed


class Finder:
    """Finds what the others find; the loaders of the modules waited for do a little more."""

    def __init__(self) -> None:
        self._asking = threading.local()
        #: The frameworks that have read their limits.
        self.settled = set()  # type: set[str]
        #: The frameworks to which no limit could be given, and why.
        self.failed = {}  # type: dict[str, str]
        #: The limits that torch has from us, by device.
        self.torch_limits = {}  # type: dict[int, float]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's spec if it is one of ours. Python's import system calls this."""
        limit = LIMITS.get(name)
        # A finder of somebody else may ask all finders in its turn, this one among them.
        if limit is None or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._asking.name = None
        if hasattr(getattr(spec, "loader", None), "exec_module"):
            spec.loader = Loader(spec.loader, limit)
        return spec

    def _ask_others(self, name: str, path: Any, target: Any) -> Any:
        for finder in [each for each in sys.meta_path if each is not self]:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                return spec
        return None


class Loader:
    """A module's own loader, which steps in again before the module is executed."""

    loader = None  # type: Any

    def __init__(self, loader: Any, limit: Any) -> None:
        self.loader = loader
        self.limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: Any) -> None:
        """Execute the module and limit its framework. Python's import system calls this."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.limit(module)


def limit_torch(cuda: Any) -> None:
    """Leave the limit with ``torch.cuda``, which calls what is left there once CUDA is initialised."""

    def set_fraction() -> None:
        settle("torch")
        finder = watching()
        limits = {} if finder is None else finder.torch_limits
        limits.clear()  # of one that was imported before
        # An error that left this function would be one of CUDA's initialisation.
        with attempt("torch"):
            set_torch(cuda, limits)

    with attempt("torch"):
        cuda._lazy_call(set_fraction)


def set_torch(cuda: Any, limits: "dict[int, float]") -> None:
    """Limit torch on each device as the environment says, but where its user has changed what we have set.

    ``limits`` are those that we have set, by device; what is set now is added.
    It is read again until it has stayed the same: another thread may be told of a change meanwhile. No lock
    is held, since torch holds one of its own while it initialises CUDA.
    """
    variable, fraction = VARIABLES["torch"], None  # type: str, str | None
    while fraction != os.environ.get(variable, ""):
        fraction = os.environ.get(variable, "")
        for device in range(cuda.device_count()) if fraction else ():
            if not is_users(cuda, device, limits.get(device)):
                cuda.set_per_process_memory_fraction(float(fraction), device)
                limits[device] = float(fraction)


def is_users(cuda: Any, device: int, ours: "float | None") -> bool:
    """Whether a device's limit is another than ours, as far as this torch tells it."""
    read = getattr(cuda, "get_per_process_memory_fraction", None)
    return read is not None and ours is not None and abs(read(device) - ours) > CLOSE


def follow_torch() -> None:
    """Change torch's limit while it runs, where it has one from us. Only what it does not use can go back.

    It keeps memory that no tensor uses for later; where that is beyond the new limit, it lets go of it.
    """
    finder, cuda = watching(), sys.modules.get("torch.cuda")
    if finder is None or cuda is None or "torch" not in finder.settled:
        return  # it reads its limit when it begins to use the GPU
    with attempt("torch"):
        set_torch(cuda, finder.torch_limits)
    with contextlib.suppress(Exception):  # another torch may not have all of this
        if any(keeps_too_much(cuda, *each) for each in finder.torch_limits.items()):
            cuda.empty_cache()


def keeps_too_much(cuda: Any, device: int, fraction: float) -> bool:
    """Whether torch has reserved more of a device than it may use."""
    return bool(cuda.memory_reserved(device) > fraction * cuda.get_device_properties(device).total_memory)


def limit_tensorflow(module: Any) -> None:
    """Limit the devices of ``tensorflow.python.eager.context`` when its context is first initialised.

    Not before: finding the devices opens the driver, and a device with a limit
    no longer lets the user say whether its memory is to grow.
    """
    lock = threading.RLock()

    def ensure_initialized(self: Any) -> None:
        with lock:
            if module.Context.ensure_initialized is not ensure_initialized:
                initialise(self)  # another thread was first
                return
            ours = []  # type: list[object]
            with attempt("tensorflow"):
                configure(module, self, ours)
            try:
                initialise(self)
                module.Context.ensure_initialized = initialise
            finally:
                # They have had their effect. Kept, they would fail a cell that is run again and says
                # again that memory is to grow, which TensorFlow otherwise accepts.
                for device in ours:
                    getattr(self, "_virtual_device_map", {}).pop(device, None)

    with attempt("tensorflow"):
        initialise = module.Context.ensure_initialized
        module.Context.ensure_initialized = ensure_initialized


def configure(module: Any, context: Any, ours: "list[object]") -> None:
    """Limit each visible GPU that its user has not; append it to ``ours``."""
    settle("tensorflow")
    limit = os.environ.get(VARIABLES["tensorflow"])
    # TensorFlow refuses to have both.
    if not limit or context.config.gpu_options.per_process_gpu_memory_fraction:
        return
    for device in context.get_visible_devices("GPU"):
        if context.get_logical_device_configuration(device) is None:
            wanted = module.LogicalDeviceConfiguration(memory_limit=int(limit))
            context.set_logical_device_configuration(device, [wanted])
            ours.append(device)


def settle(framework: str) -> None:
    """Take note that a framework has read its limit."""
    finder = watching()
    if finder is not None:
        finder.settled.add(framework)


@contextlib.contextmanager
def attempt(framework: str) -> Iterator[None]:
    """Try something for a framework. A failure is told once, and is none of the user's."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever another version of the framework raises
        failed = failures()
        if framework not in failed:
            failed[framework] = f"{type(error).__name__}: {error!s:.200}"
            print(UNLIMITED.format(framework, failed[framework]), file=sys.stderr)


#: By the module that is waited for: what is done with it once it has been executed.
LIMITS = {"torch.cuda": limit_torch, "tensorflow.python.eager.context": limit_tensorflow}
