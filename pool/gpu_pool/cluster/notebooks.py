"""Which pod is somebody's notebook server, which of its volumes is the home, and as whom it runs.

KubeSpawner writes the user's and the server's name into annotations as they
are (``hub.jupyter.org/username``, ``hub.jupyter.org/servername``, the latter
left out for the default server); its labels hold what fits into a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool.cluster.home_mounts import HomeVolume, UnclearMount, read_home
from gpu_pool.cluster.informer import Key

USERNAME: Final = "hub.jupyter.org/username"
SERVERNAME: Final = "hub.jupyter.org/servername"


@dataclass(frozen=True, slots=True)
class Identity:
    """As whom a notebook server touches the files of its home; None and empty where its pod does not say."""

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
