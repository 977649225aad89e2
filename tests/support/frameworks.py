"""Stand-ins for torch and TensorFlow, written into a folder: as much of them as sets memory limits.

They are arranged as in torch 1.8 to 2.9 and TensorFlow 2.4 to 2.21: where the
functions are, when they may be called, and what they refuse.
"""

from __future__ import annotations

from pathlib import Path

_CUDA = '''
"""Two devices, and what torch does lazily about them."""
_initialized = False
_queued_calls = []
fractions = {}

def is_initialized():
    return _initialized

def _lazy_call(callable, **kwargs):
    callable() if _initialized else _queued_calls.append(callable)

_lazy_call(lambda: None)
_is_initializing = False

def init():
    global _initialized, _is_initializing
    if _initialized or _is_initializing:
        return
    _is_initializing = True
    for call in _queued_calls:
        call()
    _initialized = True

def device_count():
    return 2

from .memory import set_per_process_memory_fraction
'''
_MEMORY = """
def set_per_process_memory_fraction(fraction, device=None):
    from torch import cuda
    cuda.init()
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    cuda.fractions[device] = fraction
"""
_CONTEXT = '''
"""A context with two GPUs, its options, and when they may be changed."""
import collections, threading, types

LogicalDeviceConfiguration = collections.namedtuple("LogicalDeviceConfiguration", ["memory_limit"])
Device = collections.namedtuple("PhysicalDevice", ["name", "device_type"])

class Context:
    def __init__(self):
        self.devices = self.visible = [Device("GPU:0", "GPU"), Device("GPU:1", "GPU")]
        self.listed = False
        self.fraction = 0.0
        self.initialised_with = None
        self._virtual_device_map = {}
        self._memory_growth_map = {}
        self._lock = threading.Lock()

    @property
    def config(self):
        options = types.SimpleNamespace(per_process_gpu_memory_fraction=self.fraction)
        return types.SimpleNamespace(gpu_options=options)

    def ensure_initialized(self):
        with self._lock:
            if self.initialised_with is None:
                found = {d.name: self._virtual_device_map.get(d) for d in self.visible}
                self.initialised_with = {
                    name: [each.memory_limit for each in limits or ()] for name, limits in found.items()
                }

    def get_visible_devices(self, kind):
        self.listed = True
        return self.visible

    def get_logical_device_configuration(self, device):
        return self._virtual_device_map.get(device)

    def set_logical_device_configuration(self, device, limits):
        if self._virtual_device_map.get(device) == limits:
            return
        if self.initialised_with is not None:
            raise RuntimeError("Virtual devices cannot be modified after being initialized")
        self._virtual_device_map[device] = limits

    def set_memory_growth(self, device, enable):
        if device in self._virtual_device_map:
            raise ValueError("Cannot set memory growth on device when virtual devices configured")
        if self._memory_growth_map.get(device) == enable:
            return
        if self.initialised_with is not None:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self._memory_growth_map[device] = enable

_context = Context()

def context():
    return _context
'''
_TENSORFLOW = """
from tensorflow.python.eager import context as _module
context = _module.context()

def constant(value):
    context.ensure_initialized()
    return value
"""


def write_torch(folder: Path) -> None:
    """Write ``torch``, ``torch.nn`` and ``torch.cuda``."""
    _write(
        folder,
        "torch-2.9.1",
        {
            "torch/__init__.py": "from torch import cuda\nfrom torch import nn\n",
            "torch/nn/__init__.py": "",
            "torch/cuda/__init__.py": _CUDA,
            "torch/cuda/memory.py": _MEMORY,
        },
    )


def write_tensorflow(folder: Path) -> None:
    """Write ``tensorflow`` with its context, which ``tensorflow.constant`` initialises."""
    _write(
        folder,
        "tensorflow-2.17.1",
        {
            "tensorflow/__init__.py": _TENSORFLOW,
            "tensorflow/python/__init__.py": "",
            "tensorflow/python/eager/__init__.py": "",
            "tensorflow/python/eager/context.py": _CONTEXT,
        },
    )


def _write(folder: Path, release: str, files: dict[str, str]) -> None:
    (folder / f"{release}.dist-info").mkdir(parents=True)
    name, _, version = release.partition("-")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for path, text in {**files, f"{release}.dist-info/METADATA": metadata}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
