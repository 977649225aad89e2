"""Which pod is somebody's notebook server, and which of its volumes is the home.

KubeSpawner writes the user's and the server's name into annotations as they
are (``hub.jupyter.org/username``, ``hub.jupyter.org/servername``, the latter
left out for the default server); its labels hold what fits into a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gpu_pool.dialects import Manifest
from gpu_pool.dialects.cluster import listing, mapping
from gpu_pool.kubernetes.watching import Key

USERNAME: Final = "hub.jupyter.org/username"
SERVERNAME: Final = "hub.jupyter.org/servername"
READ_WRITE_MANY: Final = "ReadWriteMany"


@dataclass(frozen=True, slots=True)
class Home:
    """The volume of a home folder, as a notebook server mounts it."""

    claim: str
    sub_path: str = ""


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
    home: Home | None = None
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
    containers = listing(spec.get("containers"))
    main = next((each for each in containers if each.get("name") == "notebook"), None)
    container = main or next(iter(containers), {})
    return Notebook(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        user=str(annotations[USERNAME]),
        server=str(annotations.get(SERVERNAME, "")),
        node=str(spec.get("nodeName") or ""),
        image=str(container.get("image", "")),
        home=_home(spec, container, home),
        pull_secrets=tuple(str(each.get("name")) for each in listing(spec.get("imagePullSecrets"))),
        is_ending=bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed"),
    )


def _home(spec: Manifest, container: Manifest, path: str) -> Home | None:
    claims = {
        str(volume.get("name")): str(mapping(volume["persistentVolumeClaim"]).get("claimName"))
        for volume in listing(spec.get("volumes"))
        if "persistentVolumeClaim" in volume
    }
    for mount in listing(container.get("volumeMounts")):
        at, name = str(mount.get("mountPath", "")).rstrip("/"), str(mount.get("name"))
        if at == path.rstrip("/") and name in claims:
            return Home(claims[name], str(mount.get("subPath", "")))
    return None
