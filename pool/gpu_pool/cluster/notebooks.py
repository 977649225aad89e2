"""Which pod is somebody's notebook server, as whom it runs, and how it mounts the home. Pure.

A kernel mounts the home in the same way. Whatever of a volume or of a mount is not understood here is
refused in words, and never left out: a kernel that leaves out ``subPathExpr`` has everybody's homes, and
one that leaves out ``readOnly`` writes what its user may only read.

KubeSpawner writes the user's and the server's name into annotations as they are
(``hub.jupyter.org/username``, ``hub.jupyter.org/servername``, the latter left out for the default server);
its labels hold what fits into a label.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import PREFIX, listing, mapping
from gpu_pool.cluster.informer import Key

_MOUNT_FIELDS: Final = frozenset(
    {"name", "mountPath", "subPath", "subPathExpr", "readOnly", "recursiveReadOnly", "mountPropagation"}
)
_RECURSIVE: Final = ("Disabled", "IfPossible", "Enabled")
#: ``Bidirectional`` shows a container's mounts to its node, for which it has to be privileged.
_PROPAGATION: Final = ("None", "HostToContainer")
_REFERENCE: Final = re.compile(r"\$\$|\$\(([^)]*)\)")
#: Fields of a pod that do not change while it runs, by the names that a ``fieldRef`` has for them.
_FIXED_FIELDS: Final = {
    "metadata.name": ("metadata", "name"),
    "metadata.namespace": ("metadata", "namespace"),
    "metadata.uid": ("metadata", "uid"),
    "spec.nodeName": ("spec", "nodeName"),
    "spec.serviceAccountName": ("spec", "serviceAccountName"),
}


class UnclearMount(Exception):
    """A home is mounted in a way that a kernel cannot repeat: in words, such as ``its volume is an nfs``."""


@dataclass(frozen=True, slots=True)
class HomeMount:
    """A folder of a claim's volume, and how it is mounted."""

    #: The folder of the volume; empty for all of it.
    sub_path: str = ""
    read_only: bool = False
    #: As Kubernetes has them; empty where the notebook server does not say.
    recursive_read_only: str = ""
    propagation: str = ""
    #: Where it is mounted, below the home; empty for the home itself.
    below: str = ""


@dataclass(frozen=True, slots=True)
class HomeVolume:
    """The volume of a home folder, as a notebook server mounts it."""

    claim: str
    #: The home, and parts of the same volume that are mounted below it, perhaps read-only.
    mounts: tuple[HomeMount, ...] = (HomeMount(),)
    #: Whether the claim itself is used read-only, whatever its mounts say.
    is_read_only: bool = False


def read_home(pod: Manifest, container: Manifest, path: str) -> HomeVolume | None:
    """Return what a container of a pod mounts at ``path``, or None for nothing.

    Raises ``UnclearMount`` for what a kernel's pod could not mount in the very same way.
    """
    home = _clean(path)
    mounts = [(_clean(each.get("mountPath")), each) for each in listing(container.get("volumeMounts"))]
    here = [each for at, each in mounts if at == home]
    if any(_clean(each.get("devicePath")) == home for each in listing(container.get("volumeDevices"))):
        raise UnclearMount("it is a block device, not a folder")
    if not here:
        return None
    if len(here) > 1:
        raise UnclearMount(f"{len(here)} volumes are mounted there, one over the other")
    name = here[0].get("name")
    volumes = listing(mapping(pod.get("spec")).get("volumes"))
    claim, is_read_only = _read_claim(volumes, name)
    values = _values(pod, listing(container.get("env")))
    # The same claim below its home, most likely read-only: a kernel without that mount could write there.
    same = _volumes_of(claim, volumes)
    found = []
    for at, each in mounts:
        if each.get("name") in same and _is_within(home, at):
            mount = _read_mount(each, posixpath.relpath(at, home), values)
            # A kernel has one volume of the claim, so what another one says of it is said of its mount.
            elsewhere = each.get("name") != name and _read_claim(volumes, each.get("name"))[1]
            found.append(replace(mount, read_only=mount.read_only or elsewhere))
    return HomeVolume(claim, tuple(sorted(found, key=lambda mount: mount.below)), is_read_only)


def _volumes_of(claim: str, volumes: Iterable[Manifest]) -> set[object]:
    """Return the names of the volumes that are of a claim: a pod may have several."""
    return {
        each.get("name")
        for each in volumes
        if mapping(each.get("persistentVolumeClaim")).get("claimName") == claim
    }


def _clean(path: object) -> str:
    """Return where a container finds a path, which may be written in several ways."""
    return posixpath.normpath("/" + str(path or "").lstrip("/"))


def _is_within(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _read_claim(volumes: Iterable[Manifest], name: object) -> tuple[str, bool]:
    """Return the name of the claim that a volume is, and whether it is used read-only."""
    volume = next((each for each in volumes if each.get("name") == name), None)
    if volume is None:
        raise UnclearMount(f"the pod has no volume {name!a}")
    kinds = sorted(volume.keys() - {"name"})
    if kinds != ["persistentVolumeClaim"]:
        raise UnclearMount(f"its volume is of the kind {' and '.join(kinds) or 'none'}")
    source = mapping(volume["persistentVolumeClaim"])
    _refuse_unknown(source, frozenset({"claimName", "readOnly"}), "its volume claim")
    claim = source.get("claimName")
    if not isinstance(claim, str) or not claim:
        raise UnclearMount("its volume names no claim")
    return claim, _flag(source, "readOnly")


def _read_mount(mount: Manifest, below: str, values: Mapping[str, str | None]) -> HomeMount:
    _refuse_unknown(mount, _MOUNT_FIELDS, "its mount")
    sub_path, expression = _text(mount, "subPath"), _text(mount, "subPathExpr")
    if sub_path and expression:
        raise UnclearMount("its mount has both subPath and subPathExpr")
    return HomeMount(
        sub_path=_inside(_expanded(expression, values) if expression else sub_path),
        read_only=_flag(mount, "readOnly"),
        recursive_read_only=_one_of(mount, "recursiveReadOnly", _RECURSIVE),
        propagation=_one_of(mount, "mountPropagation", _PROPAGATION),
        below="" if below == "." else below,
    )


def _refuse_unknown(found: Manifest, known: frozenset[str], what: str) -> None:
    unknown = sorted(found.keys() - known)
    if unknown:
        raise UnclearMount(f"{what} says {unknown[0]!a}, which this version does not know")


def _text(found: Manifest, key: str) -> str:
    value = found.get(key)
    if value is not None and not isinstance(value, str):
        raise UnclearMount(f"its {key} is {value!a}, which is not text")
    return value or ""


def _flag(found: Manifest, key: str) -> bool:
    value = found.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnclearMount(f"its {key} is {value!a}, and neither true nor false")
    return bool(value)


def _one_of(found: Manifest, key: str, accepted: tuple[str, ...]) -> str:
    value = _text(found, key)
    if value and value not in accepted:
        raise UnclearMount(f"its {key} is {value!a}; accepted: {', '.join(accepted)}")
    return value


def _inside(sub_path: str) -> str:
    """Return a folder of a volume that does not lead out of it, by the rules of a kubelet."""
    if sub_path.startswith("/") or ".." in sub_path.split("/"):
        raise UnclearMount(f"its folder in the volume is {sub_path!a}, which leads out of it")
    return sub_path


def _values(pod: Manifest, variables: Iterable[Manifest]) -> Mapping[str, str | None]:
    """Return a container's variables by name, as a kubelet makes them; None for what is not known here."""
    values: dict[str, str | None] = {}
    for each in variables:
        values[str(each.get("name"))] = _value(pod, each, values)
    return values


def _value(pod: Manifest, variable: Manifest, before: Mapping[str, str | None]) -> str | None:
    """Return the value of a variable; only what comes before it is put into it."""
    if "valueFrom" not in variable:
        text = variable.get("value")
        try:
            return _expanded(text, before) if isinstance(text, str) else ""
        except UnclearMount:
            return None
    source = mapping(variable["valueFrom"])
    where = _FIXED_FIELDS.get(str(mapping(source.get("fieldRef")).get("fieldPath")))
    if where is None or source.keys() != {"fieldRef"}:
        return None
    found: Any = pod
    for key in where:
        found = mapping(found).get(key)
    return found if isinstance(found, str) else None


def _expanded(text: str, values: Mapping[str, str | None]) -> str:
    """Put the values of variables in place of ``$(NAME)``, as a kubelet does."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        value = values.get(name)
        if not value:
            raise UnclearMount(
                f"its subPathExpr {text!a} uses {name!a}, which is not known from the server's pod alone; "
                "known are variables with a value, and those from what cannot change, such as metadata.name"
            )
        return value

    return _REFERENCE.sub(replaced, text)


USERNAME: Final = "hub.jupyter.org/username"
SERVERNAME: Final = "hub.jupyter.org/servername"


@dataclass(frozen=True, slots=True)
class Identity:
    """As whom a server or kernel touches the files of a home; None and empty where its pod does not say."""

    uid: int | None = None
    gid: int | None = None
    #: The group that a kubelet gives the files of its volumes; without it, it leaves them as they are.
    fs_group: int | None = None
    groups: tuple[int, ...] = ()
    #: ``Strict`` leaves out the groups that the image says.
    groups_policy: str = ""
    #: SELinux' level, by which one pod's files are kept from another.
    selinux_level: str = ""
    #: False in a user namespace of its own.
    host_users: bool = True


@dataclass(frozen=True, slots=True)
class Notebook:
    """A notebook server's pod."""

    namespace: str
    name: str
    uid: str
    user: str
    #: Its name at the Hub, empty for the default server.
    server: str
    #: Where it runs, empty while it waits for a node.
    node: str = ""
    image: str = ""
    home: HomeVolume | None = None
    #: Why a kernel cannot mount the home as this server does; empty if it can.
    home_problem: str = ""
    identity: Identity = Identity()
    #: Names of the Secrets by which its images are pulled.
    pull_secrets: tuple[str, ...] = ()
    #: Whether it is being deleted, or has ended.
    is_ending: bool = False
    #: Its course as the spawner has labelled it; empty where it has none.
    course_label: str = ""


class Notebooks:
    """The notebook servers of a cluster, by name and by uid."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._by_key: dict[Key, Notebook] = {}
        self._by_uid: dict[str, Notebook] = {}
        self._by_name: dict[tuple[str, str], Notebook] = {}

    def of(self, user: str, server: str) -> Notebook | None:
        """Return somebody's notebook server."""
        found = self._by_name.get((user, server))
        return None if found is None or found.is_ending else found

    def living(self) -> list[Notebook]:
        """Return all notebook servers that are not about to end, by name."""
        found = (each for each in self._by_name.values() if not each.is_ending)
        return sorted(found, key=lambda each: (each.namespace, each.name))

    def has(self, uid: str) -> bool:
        """Whether a notebook server is there still."""
        found = self._by_uid.get(uid)
        return found is not None and not found.is_ending

    def take_over(self, key: Key, pod: Manifest | None) -> str:
        """Take over a pod that has changed, or None; return the uid of the notebook server that it ended."""
        before = self._by_key.pop(key, None)
        notebook = None if pod is None else read_notebook(pod, self._home)
        if before is not None:
            self._by_uid.pop(before.uid, None)
            if self._by_name.get((before.user, before.server)) == before:
                del self._by_name[before.user, before.server]
        if notebook is not None:
            self._by_key[key] = self._by_uid[notebook.uid] = notebook
            # One that was started elsewhere meanwhile counts, and not the one that ends.
            known = self._by_name.get((notebook.user, notebook.server))
            if known is None or known.is_ending or not notebook.is_ending:
                self._by_name[notebook.user, notebook.server] = notebook
        return before.uid if before and (notebook is None or notebook.is_ending) else ""


def in_any(namespaces: Iterable[str]) -> Callable[[str], bool]:
    """Return whether a namespace is one of these, in whose names ``{…}`` stands for anything."""
    patterns = (re.sub(r"\\{\w+\\}", "[a-z0-9-]+", re.escape(each)) for each in namespaces)
    known = re.compile("|".join(f"(?:{each})" for each in patterns), re.ASCII)
    return lambda name: known.fullmatch(name) is not None


def read_notebook(pod: Manifest, home: str) -> Notebook | None:
    """Return the notebook server that a pod is, its home mounted at ``home``; None for other pods."""
    metadata, spec, status = (mapping(pod.get(key)) for key in ("metadata", "spec", "status"))
    annotations = mapping(metadata.get("annotations"))
    if USERNAME not in annotations:
        return None
    container: Manifest = {}
    home_at, problem = None, ""
    try:
        container = _main_container(spec)
        home_at = read_home(pod, container, home)
    except UnclearMount as unclear:
        problem = str(unclear)
    return Notebook(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        user=str(annotations[USERNAME]),
        server=str(annotations.get(SERVERNAME, "")),
        node=str(spec.get("nodeName") or ""),
        image=str(container.get("image", "")),
        home=home_at,
        home_problem=problem,
        identity=_identity(spec, container),
        pull_secrets=tuple(str(each.get("name")) for each in listing(spec.get("imagePullSecrets"))),
        is_ending=bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed"),
        course_label=str(mapping(metadata.get("labels")).get(f"{PREFIX}/course", "")),
    )


def _main_container(spec: Manifest) -> Manifest:
    """Return the container that the user works in, which KubeSpawner calls ``notebook``, or the only one."""
    containers = listing(spec.get("containers"))
    named = next((each for each in containers if each.get("name") == "notebook"), None)
    if named is None and len(containers) > 1:
        raise UnclearMount(f"none of the {len(containers)} containers of its pod is called notebook")
    return named or next(iter(containers), {})


def _identity(spec: Manifest, container: Manifest) -> Identity:
    of_pod = mapping(spec.get("securityContext"))
    both = {**of_pod, **mapping(container.get("securityContext"))}
    groups = of_pod.get("supplementalGroups")
    return Identity(
        uid=_number(both.get("runAsUser")),
        gid=_number(both.get("runAsGroup")),
        fs_group=_number(of_pod.get("fsGroup")),
        groups=tuple(filter(_number, groups)) if isinstance(groups, list) else (),
        groups_policy=str(of_pod.get("supplementalGroupsPolicy") or ""),
        selinux_level=str(mapping(both.get("seLinuxOptions")).get("level") or ""),
        host_users=spec.get("hostUsers") is not False,
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
