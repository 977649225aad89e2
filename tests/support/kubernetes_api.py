"""Which objects and fields the API servers of some versions of Kubernetes know, and who asks for others.

``kubernetes_api.json`` has what their published OpenAPI descriptions (``api/openapi-spec/swagger.json``
of their repository) say about the kinds of :data:`KINDS`: every field with its type, which are required, and
what is not in all of the versions. To record it again, with files such as ``1.36.json`` in a folder::

    python -m support.kubernetes_api FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).with_suffix(".json")
#: What the chart, the examples and the service make; kinds of other makers are in no such description.
KINDS = (
    "v1 ConfigMap",
    "v1 Namespace",
    "v1 PersistentVolumeClaim",
    "v1 Pod",
    "v1 ResourceQuota",
    "v1 Secret",
    "v1 Service",
    "v1 ServiceAccount",
    "admissionregistration.k8s.io/v1 ValidatingAdmissionPolicy",
    "admissionregistration.k8s.io/v1 ValidatingAdmissionPolicyBinding",
    "apps/v1 DaemonSet",
    "apps/v1 Deployment",
    "networking.k8s.io/v1 NetworkPolicy",
    "rbac.authorization.k8s.io/v1 ClusterRole",
    "rbac.authorization.k8s.io/v1 ClusterRoleBinding",
    "rbac.authorization.k8s.io/v1 Role",
    "rbac.authorization.k8s.io/v1 RoleBinding",
    "resource.k8s.io/v1 ResourceClaim",
    "resource.k8s.io/v1 ResourceClaimTemplate",
    "resource.k8s.io/v1beta1 ResourceClaim",
    "resource.k8s.io/v1beta1 ResourceClaimTemplate",
    "resource.k8s.io/v1beta2 ResourceClaim",
    "resource.k8s.io/v1beta2 ResourceClaimTemplate",
)
#: Written by the API server, or read by nobody here.
_LEFT_OUT = frozenset({"status", "managedFields"})
_SCALARS = {"string": str, "boolean": bool, "integer": int, "number": (int, float)}
#: Types that are written in more than one way: a number or a text, or anything.
_ANYTHING = ("IntOrString", "Quantity", "RawExtension", "JSON")


class Api:
    """The API of one version of Kubernetes, such as "1.36"."""

    def __init__(self, version: str) -> None:
        """Read what is recorded of it."""
        self._table = json.loads(_TABLE.read_text())
        self._at = self._table["versions"].index(version)

    @staticmethod
    def versions() -> list[str]:
        """Return the versions that are recorded, the oldest first."""
        found: list[str] = json.loads(_TABLE.read_text())["versions"]
        return found

    def faults(self, given: Mapping[str, Any]) -> list[str]:
        """Return what such an API server would not take of an object, or would drop, in words."""
        kind = f"{given.get('apiVersion')} {given.get('kind')}"
        if not self._is_served(self._table["kinds"].get(kind)):
            return [f"{kind} is not served"]
        name = self._table["kinds"][kind]["type"]
        fields = {key: value for key, value in given.items() if key not in ("apiVersion", "kind")}
        return [f"{kind} {given['metadata']['name']}{fault}" for fault in self._object("", name, fields)]

    def _is_served(self, entry: Mapping[str, Any] | None) -> bool:
        if entry is None:
            return False
        first, last = entry.get("served", (self._table["versions"][0], self._table["versions"][-1]))
        return bool(self._table["versions"].index(first) <= self._at <= self._table["versions"].index(last))

    def _object(self, where: str, name: str, given: Any) -> Iterator[str]:
        if not isinstance(given, dict):
            yield f"{where} is not an object: {given!r}"
            return
        known = self._table["types"][name]
        for key in sorted(set(known.get("required", ())) - given.keys()):
            yield f"{where}.{key} is missing"
        for key, value in given.items():
            entry = known["fields"].get(key)
            entry = {"type": entry} if isinstance(entry, str) else entry
            if not self._is_served(entry):
                yield f"{where}.{key} is not known"
            elif value is not None:
                yield from self._value(f"{where}.{key}", entry["type"], value)

    def _value(self, where: str, of: str, given: Any) -> Iterator[str]:
        if of.startswith("["):
            if not isinstance(given, list):
                yield f"{where} is not a list: {given!r}"
                return
            for number, each in enumerate(given):
                yield from self._value(f"{where}[{number}]", of[1:-1], each)
        elif of.startswith("{"):
            if not isinstance(given, dict):
                yield f"{where} is not a map: {given!r}"
                return
            for key, each in given.items():
                yield from self._value(f"{where}[{key!r}]", of[1:-1], each)
        elif of in _SCALARS:
            is_so = isinstance(given, _SCALARS[of]) and (of == "boolean" or not isinstance(given, bool))
            if not is_so:
                yield f"{where} is not of type {of}: {given!r}"
        elif of != "any":
            yield from self._object(where, of, given)


class _Recorder:
    """What to write down of some OpenAPI descriptions."""

    def __init__(self, described: Mapping[str, Mapping[str, Any]]) -> None:
        self._described = described
        self._versions = list(described)
        self.types: dict[str, Any] = {}

    def table(self) -> dict[str, Any]:
        kinds = {kind: self._kind(kind) for kind in KINDS}
        return {"versions": self._versions, "kinds": kinds, "types": dict(sorted(self.types.items()))}

    def _kind(self, wanted: str) -> Any:
        names = {version: self._name(version, wanted) for version in self._versions}
        (name,) = {each for each in names.values() if each}
        self._add(name)
        served = [version for version, each in names.items() if each]
        return {"type": _short(name), **self._range(served)}

    def _name(self, version: str, wanted: str) -> str:
        for name, told in self._described[version].items():
            for each in told.get("x-kubernetes-group-version-kind", ()):
                of = f"{each['group']}/{each['version']}" if each["group"] else each["version"]
                if f"{of} {each['kind']}" == wanted and len(told["x-kubernetes-group-version-kind"]) == 1:
                    return name
        return ""

    def _range(self, served: list[str]) -> dict[str, Any]:
        return {} if served == self._versions else {"served": [served[0], served[-1]]}

    def _add(self, name: str) -> None:
        if _short(name) in self.types:
            return
        made: dict[str, Any] = {"fields": {}}
        self.types[_short(name)] = made
        there = [version for version in self._versions if name in self._described[version]]
        newest = self._described[there[-1]][name]
        if required := newest.get("required"):
            made["required"] = [each for each in required if each not in _LEFT_OUT]
        for key in sorted({key for v in there for key in self._described[v][name].get("properties", {})}):
            if key in _LEFT_OUT or (key in ("apiVersion", "kind") and "metadata" in newest["properties"]):
                continue
            has = [v for v in there if key in self._described[v][name].get("properties", {})]
            of = self._type(self._described[has[-1]][name]["properties"][key], has[-1])
            range_ = {} if has == there else self._range(has)
            made["fields"][key] = {"type": of, **range_} if range_ else of

    def _type(self, told: Mapping[str, Any], version: str) -> str:
        if "$ref" in told:
            name = told["$ref"].rpartition("/")[2]
            target = self._described[version][name]
            if name.rpartition(".")[2] in _ANYTHING:
                return "any"
            if "properties" not in target:
                return "any" if target.get("type", "object") == "object" else str(target["type"])
            self._add(name)
            return _short(name)
        if told.get("type") == "array":
            return f"[{self._type(told['items'], version)}]"
        if "additionalProperties" in told:
            return f"{{{self._type(told['additionalProperties'], version)}}}"
        return str(told["type"]) if told.get("type") in _SCALARS else "any"


def _short(name: str) -> str:
    """Return a type's name without what all of them begin with."""
    return name.removeprefix("io.k8s.api.").removeprefix("io.k8s.apimachinery.pkg.apis.")


def record(folder: Path) -> str:
    """Return the table of the descriptions in a folder, as it is kept."""
    files = sorted(folder.glob("*.json"), key=lambda path: [int(each) for each in path.stem.split(".")])
    described = {path.stem: json.loads(path.read_text())["definitions"] for path in files}
    table = _Recorder(described).table()
    lines = [f'"{key}": {json.dumps(table[key])}' for key in ("versions",)]
    for key in ("kinds", "types"):
        inner = ",\n".join(f'"{name}": {json.dumps(told)}' for name, told in table[key].items())
        lines.append(f'"{key}": {{\n{inner}\n}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    _TABLE.write_text(record(Path(sys.argv[1])))
