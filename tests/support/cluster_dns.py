"""The DNS of a cluster: CoreDNS in a pod of ``kube-system``, as clusters have it and policies allow it.

A process of the node would do for names, and would be none of the addresses that policies open.
"""

from __future__ import annotations

from typing import Any

#: The image of its pod, whose one file is the program.
IMAGE = "localhost/coredns:1"
PROGRAM = "/coredns"
NAMESPACE = "kube-system"
_NAME = "coredns"
_LABELS = {"k8s-app": "kube-dns"}
_SETTINGS = """.:53 {
    errors
    ready
    kubernetes cluster.local
}
"""
#: What it reads.
_RULES = [
    {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
]


def dns(address: str) -> list[dict[str, Any]]:
    """Return what makes it, where the Service has this address."""
    account = {"kind": "ServiceAccount", "name": _NAME, "namespace": NAMESPACE}
    role = {"kind": "ClusterRole", "name": _NAME, "apiGroup": "rbac.authorization.k8s.io"}
    ports = [{"name": f"dns-{each}", "port": 53, "protocol": each.upper()} for each in ("udp", "tcp")]
    return [
        _object("v1", "ServiceAccount"),
        {**_object("rbac.authorization.k8s.io/v1", "ClusterRole"), "rules": _RULES},
        {
            **_object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"),
            "subjects": [account],
            "roleRef": role,
        },
        {**_object("v1", "ConfigMap"), "data": {"Corefile": _SETTINGS}},
        {
            **_object("apps/v1", "Deployment"),
            "spec": {
                "selector": {"matchLabels": _LABELS},
                "template": {"metadata": {"labels": _LABELS}, "spec": _pod()},
            },
        },
        {
            **_object("v1", "Service", "kube-dns"),
            "spec": {"clusterIP": address, "selector": _LABELS, "ports": ports},
        },
    ]


def _object(version: str, kind: str, name: str = _NAME) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE}}


def _pod() -> dict[str, Any]:
    container = {
        "name": _NAME,
        "image": IMAGE,
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "settings", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    return {
        "serviceAccountName": _NAME,
        "dnsPolicy": "Default",
        # A node that is drained, or shows GPUs, has it all the same.
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "settings", "configMap": {"name": _NAME}}],
    }
