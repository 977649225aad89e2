"""Which kernelspecs ask for this package's provisioner, and with what. Imports nothing else of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: The name under which kernelspecs ask for it.
PROVISIONER: Final = "gpu-pool"


def config_of(spec: object) -> Mapping[str, Any] | None:
    """Return what a kernelspec, as JSON has it, configures of the provisioner; None where it asks for none.

    Anybody's kernelspec may be malformed: what is not of the right kind configures nothing.
    """
    stanza = _entry(_entry(spec, "metadata"), "kernel_provisioner")
    if _entry(stanza, "provisioner_name") != PROVISIONER:
        return None
    config = _entry(stanza, "config")
    return config if isinstance(config, Mapping) else {}


def _entry(mapping: object, key: str) -> object:
    """Return an entry of what should be a mapping; None if it is not one, or has none."""
    return mapping.get(key) if isinstance(mapping, Mapping) else None
