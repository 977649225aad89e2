"""The node agents as the chart runs them, on a real kubelet, with a stand-in for the driver in their pods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.charts import rendered_chart
from support.kube_examples import one
from support.kubelet import RealCluster

ACCOUNT = "gpu-pool-node-agent"


def daemons(
    cluster: RealCluster,
    namespace: str,
    url: str,
    folder: Path,
    program: str,
    variables: Mapping[str, str],
    **values: Any,
) -> list[dict[str, Any]]:
    """Return what the chart makes in the namespace, of these values of its ``nodeAgent``.

    ``folder`` has the stand-in's libraries, and ``program`` runs the agent with it and these variables.
    """
    chosen = {"enabled": True, "namespace": namespace, "createNamespace": False, "every": "1s", **values}
    written = folder / "values.json"
    written.write_text(json.dumps({"nodeAgent": chosen, "networkPolicy": {"enabled": False}}))
    chart = rendered_chart("elsewhere", "--values", str(written))
    found = [each for each in chart if each["metadata"].get("namespace") == namespace]
    spec = one(found, "DaemonSet", ACCOUNT)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    container |= {
        "image": cluster.image,
        "command": ["python3", "-c", program, "node-agent"],
        "args": [f"--pool={url}", *container["args"][1:]],
    }
    told = {"LD_LIBRARY_PATH": str(folder), **variables}
    container["env"] += [{"name": name, "value": value} for name, value in told.items()]
    may_write = bool(chosen.get("suspend"))
    container["volumeMounts"].append({"name": "driver", "mountPath": str(folder), "readOnly": not may_write})
    for volume in spec["volumes"]:
        if "hostPath" in volume:  # nothing of it stays on this machine
            volume["hostPath"]["path"] = str(folder / "of-node")
    spec["volumes"].append({"name": "driver", "hostPath": {"path": str(folder)}})
    return found
