"""Real libraries, where they are installed: preloaded, used, and held to a slice as in cold kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.jupyter_env import JupyterEnv, Managers, answer
from support.libraries import kernels_python
from support.warm_kernels import start, until_ready

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("soon")]

#: By library: what it computes, and what it draws at random.
LIBRARIES = {
    "numpy": (
        "numpy.linalg.inv(2 * numpy.eye(300)).sum()",
        "numpy.random.rand(), numpy.random.default_rng().random()",
    ),
    "pandas": (
        "pandas.DataFrame({'a': [1, 2]}).sum().to_list()",
        "pandas.Series(range(10**9)[::1000]).sample(1).item()",
    ),
    "sklearn.ensemble": (
        "sklearn.ensemble.RandomForestClassifier(5, random_state=1, n_jobs=2)"
        ".fit([[0], [1]] * 20, [0, 1] * 20).predict([[0], [1]])",
        "sklearn.utils.check_random_state(None).rand()",
    ),
    "matplotlib.pyplot": ("len(matplotlib.pyplot.plot([1, 2]))", "__import__('random').random()"),
    "torch": (
        "torch.autograd.grad((one := torch.ones(3, requires_grad=True)).pow(2).sum(), one)[0].tolist()",
        "torch.rand(1).item(), torch.randn(1).item(), torch.initial_seed(),"
        " torch.nn.Linear(1, 1).weight.item()",
    ),
    "tensorflow": (
        "tensorflow.function(lambda x: x * 2, jit_compile=True)(tensorflow.ones([2])).numpy().tolist()",
        "float(tensorflow.random.uniform([])), float(tensorflow.random.normal([])),"
        " float(tensorflow.random.Generator.from_non_deterministic_state().normal([])),"
        " float(tensorflow.random.get_global_generator().normal([])),"
        " float(tensorflow.keras.initializers.GlorotUniform()([1, 1])[0, 0])",
    ),
    # Its numbers are those of the keys that a program makes.
    "jax": (
        "jax.numpy.ones(3).sum().item(), jax.random.uniform(jax.random.key(1)).item()",
        "__import__('random').random()",
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_library_is_preloaded_and_computes_and_draws_numbers_of_its_own(
    jupyter_env: JupyterEnv, manager: Managers, library: str
) -> None:
    argv = [kernels_python("ipykernel", library), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    name = jupyter_env.install("warm", argv=argv, preload=[library])
    cold = manager(name)
    await until_ready(cold)
    computed, drawn = LIBRARIES[library]
    code = f"import {library}\nprint({computed})"
    expected = await answer(cold, code)
    numbers = []
    for _ in range(2):
        km = manager(name)
        assert await start(km)
        assert await answer(km, code) == expected
        assert library in (await answer(km, "import sys; print(list(sys.modules))"))
        numbers.append(
            (await answer(km, f"import {library}\nprint({drawn})")).strip().strip("()").split(", ")
        )
    assert numbers[0]
    assert not set(numbers[0]) & set(numbers[1]), numbers


#: Prints what the variables of a slice are for Python and for C, and what each library has made of them.
UNDERSTOOD = """
import ctypes, json, os, sys
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
beginnings = ("CUDA_", "GPU_POOL_TORCH", "GPU_POOL_TENSORFLOW", "PYTORCH_", "TF_FORCE", "XLA_", "CUPY_")
names = sorted(name for name in os.environ if name.startswith(beginnings))
seen = {"variables": {name: [os.environ[name], (getenv(name.encode()) or b"").decode()] for name in names}}
"""
TORCH = """
import torch
seen["settings"] = torch._C._accelerator_getAllocatorSettings()
seen["hooked"] = [call[0].__name__ for call in torch.cuda._queued_calls if "fraction" in call[0].__name__]
"""
JAX = """
from jaxlib import xla_client
options = xla_client.generate_pjrt_gpu_plugin_options()
seen["settings"] = {name: options[name] for name in ("memory_fraction", "preallocate")}
"""
#: As if there was a GPU: what is left with it before it is used.
TENSORFLOW = """
import tensorflow
from tensorflow.python.eager import context as module
context = module.context()
context._initialize_physical_devices()
gpu = module.PhysicalDevice("/physical_device:GPU:0", "GPU")
context._physical_devices.append(gpu)
context._visible_device_list.append(gpu)
context._memory_growth_map[gpu] = None
caps = sys.modules["_gpu_pool_inkernel.caps"]
seen["hooked"] = [caps.LIMITS[module.__name__].__name__, module.Context.ensure_initialized.__module__]
caps.configure(module, context, [])
(limit,) = context.get_logical_device_configuration(gpu)
seen["settings"] = limit.memory_limit
"""
READ = {"torch": TORCH, "jax": JAX, "tensorflow": TENSORFLOW}


@pytest.mark.parametrize("library", READ)
async def test_a_library_understands_its_limits_as_in_a_kernel_that_started_cold(
    jupyter_env: JupyterEnv, manager: Managers, library: str
) -> None:
    """No GPU is used here: what one does with the limits is tested in tests/gpu."""
    argv = [kernels_python("ipykernel", library), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    # What torch before 2.10 is limited by; newer ones are by their variable.
    older = {"GPU_POOL_TORCH_FRACTION": "0.01"}
    name = jupyter_env.install("warm", argv=argv, preload=[library], env=older)
    cold, warm = manager(name), manager(name)
    await until_ready(cold)
    assert await start(warm)
    code = f"{UNDERSTOOD}{READ[library]}\nprint(json.dumps(seen))"
    of_cold, of_warm = [last_line(await answer(km, code)) for km in (cold, warm)]
    assert of_warm == of_cold
    assert all(python == c for python, c in of_warm["variables"].values())
    if library == "torch":
        fraction = of_warm["variables"].get("PYTORCH_CUDA_ALLOC_CONF", [""])[0]
        assert of_warm["settings"] == fraction
        assert of_warm["hooked"] == ["set_fraction"]
    elif library == "jax":
        fraction = of_warm["variables"]["XLA_PYTHON_CLIENT_MEM_FRACTION"][0]
        assert of_warm["settings"] == {"memory_fraction": float(fraction), "preallocate": False}
    else:
        assert of_warm["settings"] == int(of_warm["variables"]["GPU_POOL_TENSORFLOW_MIB"][0])
        assert of_warm["variables"]["TF_FORCE_GPU_ALLOW_GROWTH"] == ["true", "true"]


def last_line(printed: str) -> dict[str, Any]:
    """Return what was printed last; libraries print, too."""
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found
