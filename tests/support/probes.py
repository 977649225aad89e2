"""Pods that say how a node treats them: the nodes of the tests and a real kubelet are compared by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What :func:`writing` says on a node as it should be.
WRITTEN = "own\nhidden"


def container(name: str, command: Sequence[str], image: str, **spec: Any) -> dict[str, Any]:
    """Return a pod of one container, which runs once."""
    main = {"name": "main", "image": image, "command": list(command)}
    main |= {key: spec.pop(key) for key in ("env", "volumeMounts") if key in spec}
    toleration = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    spec = {"restartPolicy": "Never", "tolerations": toleration, **spec, "containers": [main]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def writing(image: str) -> list[dict[str, Any]]:
    """Return a pod ``writing``, and its Secret: it tries to write wherever something is mounted."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "stringData": {"key": "hidden"},
    }
    places = {"secret": "/etc/told", "shared": "/srv/shared", "own": "/srv/own"}
    tries = [f"{{ echo x > {path}/key; }} 2> /dev/null && echo {name}" for name, path in places.items()]
    made = container(
        "writing",
        ["sh", "-c", f"{'; '.join(tries)}; cat /etc/told/key"],
        image,
        volumes=[
            {"name": "secret", "secret": {"secretName": "s"}},
            {"name": "shared", "emptyDir": {}},
            {"name": "own", "emptyDir": {}},
        ],
        volumeMounts=[
            {"name": name, "mountPath": path, "readOnly": name == "shared"} for name, path in places.items()
        ],
    )
    # Root, who is kept from writing by mounts alone.
    made["spec"]["securityContext"] = {"runAsUser": 0}
    return [secret, made]
