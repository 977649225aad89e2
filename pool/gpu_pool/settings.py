"""What an administrator can set about a pool.

Read from ``gpu_pool_config.py`` and ``gpu_pool_config.json`` in Jupyter's
configuration directories (``jupyter --paths``), so that every process that
opens the same pool follows the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jupyter_core.paths import jupyter_config_path
from traitlets import Float, Integer, TraitError
from traitlets.config import Config, Configurable, ConfigurableError
from traitlets.config.loader import ConfigFileNotFound, JSONFileConfigLoader, PyFileConfigLoader

from gpu_pool_client import WHOLE, BadRequest

_NAME = "gpu_pool_config"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that admission and placement decide by, as plain integers."""

    #: Memory, in MiB, that CUDA itself takes in a process; no slice may be smaller.
    context_mib: int = 350
    #: Thousandths of compute that may be granted on one device in all.
    device_milli: int = WHOLE
    #: Context slots one lease takes on a device that counts them.
    lease_contexts: int = 2
    #: The largest share of one device that one lease may have, in thousandths.
    max_milli: int = WHOLE
    #: The most memory, in MiB, that one lease may have on one device; 0 for no limit.
    max_memory_mib: int = 0
    #: The most devices that one lease may have; 0 for no limit.
    max_devices: int = 0


class PoolSettings(Configurable):
    """Settings of a pool, under ``c.PoolSettings`` in ``gpu_pool_config.py``."""

    # 350 MiB: a PyTorch process with lazy loading uses 250 to 430 MiB of device memory
    # before its first tensor (pytorch#86509, #20532), and slices below about 350 MiB
    # were found unusable (HAMi#1370).
    context_mib = Integer(
        350,
        min=0,
        help="Memory in MiB that CUDA itself takes in a process. Smaller slices are refused.",
    ).tag(config=True)
    compute_overcommit = Float(
        1.0,
        min=1.0,
        max=100.0,
        help="How many times over the compute of a device may be granted. Memory never is.",
    ).tag(config=True)
    max_share = Float(
        1.0,
        min=0.001,
        max=1.0,
        help="The largest share of one device that one lease may have, whatever a kernelspec says.",
    ).tag(config=True)
    max_memory_mib = Integer(
        0, min=0, help="The most memory in MiB that one lease may have on one device; 0 for no limit."
    ).tag(config=True)
    max_devices = Integer(0, min=0, help="The most devices that one lease may have; 0 for no limit.").tag(
        config=True
    )
    attach_within = Float(
        120.0,
        min=1.0,
        help="Seconds in which a process must be attached to a granted lease before it ends.",
    ).tag(config=True)

    @property
    def rules(self) -> Rules:
        """What placement and admission need of these settings."""
        return Rules(
            context_mib=self.context_mib,
            device_milli=round(self.compute_overcommit * WHOLE),
            max_milli=round(self.max_share * WHOLE),
            max_memory_mib=self.max_memory_mib,
            max_devices=self.max_devices,
        )


def load_settings() -> PoolSettings:
    """Read the settings from Jupyter's configuration directories.

    Raises ``BadRequest`` that names the file when one cannot be understood.
    """
    merged = Config()
    for folder in reversed(jupyter_config_path()):
        for loader in (
            PyFileConfigLoader(f"{_NAME}.py", path=folder),
            JSONFileConfigLoader(f"{_NAME}.json", path=folder),
        ):
            merged.merge(_load(loader, Path(folder)))
    try:
        return PoolSettings(config=merged)
    except (TraitError, ConfigurableError) as error:
        raise BadRequest(f"A setting in {_NAME} is wrong: {error}") from error


def _load(loader: PyFileConfigLoader | JSONFileConfigLoader, folder: Path) -> Config:
    try:
        return loader.load_config()
    except ConfigFileNotFound:
        return Config()
    except Exception as error:
        raise BadRequest(
            f"{folder / loader.filename} cannot be read: {type(error).__name__}: {error}.",
            "Correct it, or move it away.",
        ) from error
