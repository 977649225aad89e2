"""The life of one pod on a node of the tests: from bound to ended. See node_agent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio.client import CoreV1Api
from kubernetes_asyncio.client.exceptions import ApiException

from support.containers import Image, Network, Running, Sandbox, start
from support.pod_process import Place, container_of, unknown_in
from support.pod_status import Record, conditions_of, event, now, phase_of
from support.pod_volumes import Manifest, NotYet, Volumes

#: Seconds until something that may have changed is looked at again.
_AGAIN = 0.1
#: Seconds until what has failed is tried again: ten and more with a kubelet.
_BACK_OFF = 1.0
#: What containerd and runc say before runc's reason.
_NOT_STARTED = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
    "runc create failed: unable to start container process:"
)
_LATE = "Pod was active on the node longer than the specified deadline"


@dataclass
class PodStop:
    """Why a pod is ended before its time."""

    grace: float = 0.0
    #: Written down as the pod's, unless it is deleted.
    reason: str = ""
    message: str = ""
    deleted: bool = False
    #: Whether nobody is told, since the node is lost.
    silent: bool = False


@dataclass(frozen=True)
class NodeResources:
    """What all pods of a node agent share."""

    image: Image
    network: Network
    #: What is the matter with an image, by its name.
    images: Mapping[str, str]


class _Ended(Exception):
    """The pod is being ended: what waits still is not started any more."""


class PodRunner:
    """Runs one pod, and reports of it; without resources it only reports."""

    def __init__(
        self, core: CoreV1Api, pod: Manifest, place: Place, number: int, resources: NodeResources | None
    ) -> None:
        self._core, self._pod, self._place, self._number, self._resources = (
            core,
            pod,
            place,
            number,
            resources,
        )
        spec = pod["spec"]
        self.node = str(spec["nodeName"])
        begin = {
            "waiting": {"reason": "PodInitializing" if spec.get("initContainers") else "ContainerCreating"}
        }
        self._inits = [Record({**each, "is_init": True}, begin) for each in spec.get("initContainers", ())]
        self._containers = [Record(each, begin) for each in spec["containers"]]
        self._stop: asyncio.Future[PodStop] = asyncio.get_running_loop().create_future()
        self._sandbox: Sandbox | None = None
        self._reporting = asyncio.Lock()
        self._running: dict[str, Running] = {}
        self._killed_for: dict[str, str] = {}
        self._volumes: Volumes | None = None
        self._started, self._address = now(), ""
        self.task = asyncio.create_task(self._run())

    def stop(self, why: PodStop) -> None:
        """End it; the first reason counts."""
        if not self._stop.done():
            self._stop.set_result(why)

    def kill(self, reason: str) -> None:
        """Kill its processes as the system does that has no memory left."""
        for name, running in self._running.items():
            self._killed_for[name] = reason
            running.send(signal.SIGKILL)

    async def _run(self) -> None:
        life = asyncio.create_task(self._live() if self._resources else self._idle())
        waits: set[asyncio.Future[Any]] = {life, self._stop}
        deadline = self._pod["spec"].get("activeDeadlineSeconds")
        await asyncio.wait(waits, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        else:
            await self._cut_short(life)
        if self._stop.done() and self._stop.result().deleted:
            await self.gone()

    async def _cut_short(self, life: asyncio.Task[None]) -> None:
        if not self._stop.done():
            grace = self._pod["spec"].get("terminationGracePeriodSeconds", 30)
            await self._event("DeadlineExceeded", _LATE)
            self.stop(PodStop(grace, "DeadlineExceeded", _LATE))
        why = self._stop.result()
        if why.silent and self._resources:
            self._resources.network.leave(self._number)
        await self._end(life, why.grace)
        for record in self._containers:
            record.never_ran()
        if not why.deleted and not why.silent:
            await self._report("Failed", why.reason, why.message)

    async def _end(self, life: asyncio.Task[None], grace: float) -> None:
        for name, running in list(self._running.items()):
            running.send(signal.SIGTERM)
            await self._event("Killing", f"Stopping container {name}")
        await asyncio.wait({life}, timeout=grace)
        for running in self._running.values():
            running.send(signal.SIGKILL)
        await life

    async def _idle(self) -> None:
        """Run nothing, for a test of many pods."""
        for record in self._containers:
            record.runs()
        self._address = self._place.address
        await self._report()
        await asyncio.wait({self._stop})

    async def _pause(self, seconds: float) -> None:
        await asyncio.wait({self._stop}, timeout=seconds)
        self._go_on()

    def _go_on(self) -> None:
        if self._stop.done():
            raise _Ended

    async def gone(self) -> None:
        """Report how it ended, and let it be deleted."""
        await self._report(self._end_phase())
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._pod["metadata"]["uid"]}}
        await self._write("delete_namespaced_pod", options)

    async def _live(self) -> None:
        assert self._resources is not None
        if unknown := unknown_in(self._pod):
            words = f"The nodes of the tests have no {unknown}: that needs a kubelet (tests/cluster/kubelet)."
            await self._event("NotOnThisNode", words, "Warning")
            await self._report("Failed", "NotOnThisNode", words)
            return
        try:
            await self._report()
            await self._mount()
            await self._isolate(self._resources)
            for record in self._inits:
                if await self._container(record):
                    await self._report()
                    return
            await asyncio.gather(*map(self._container, self._containers))
            await self._report()
        except _Ended:
            pass
        finally:
            await self._sweep(self._resources)

    async def _mount(self) -> None:
        assert self._resources is not None
        uid, folder = self._pod["metadata"]["uid"], self._place.folder / "volumes"
        memory = self._resources.image.folder / uid / "volumes"
        self._volumes = Volumes(self._core, self._pod, folder, memory, self._place.claims)
        told = ""
        while True:
            try:
                return await self._volumes.make()
            except NotYet as trouble:
                words = str(trouble)
            except aiohttp.ClientError:
                words = told
            if words != told:
                for line in words.splitlines():
                    await self._event("FailedMount", line, "Warning")
            told = words
            await self._pause(_AGAIN)

    async def _isolate(self, resources: NodeResources) -> None:
        """Make what its containers share, and give it its address."""
        spec, metadata = self._pod["spec"], self._pod["metadata"]
        self._go_on()
        self._sandbox = await Sandbox.made(
            spec.get("hostname", metadata["name"])[:63],
            resources.image.folder / metadata["uid"],
            shares_processes=spec.get("shareProcessNamespace", False),
        )
        try:
            await asyncio.to_thread(resources.network.join, self._sandbox.pid, self._number)
        except OSError:
            self._go_on()  # its node was lost meanwhile, and with it what was just being made
            raise
        self._address = self._place.address

    async def _sweep(self, resources: NodeResources) -> None:
        """End what is left of it."""
        if self._sandbox is not None:
            await asyncio.to_thread(resources.network.leave, self._number)
            await self._sandbox.end()

    async def _pull(self, record: Record) -> None:
        assert self._resources is not None
        image = record.container["image"]
        policy = record.container.get("imagePullPolicy", "IfNotPresent")
        state = self._resources.images.get(image, "there")
        if state == "there" and policy != "Always":
            await self._event("Pulled", f'Container image "{image}" already present on machine')
            return
        if policy == "Never":
            words = f'Container image "{image}" is not present with pull policy of Never'
            await self._event("ErrImageNeverPull", words, "Warning")
            await self._refused(record, "ErrImageNeverPull", words)
        else:
            await self._event("Pulling", f'Pulling image "{image}"')
        while (state := self._resources.images.get(image, "there")) != "there":
            if state == "missing" and policy != "Never":
                words = f'Failed to pull image "{image}": not found'
                await self._event("Failed", words, "Warning")
                await self._refused(record, "ErrImagePull", words)
                await self._comes(image)
                words = f'Back-off pulling image "{image}": ErrImagePull: {words}'
                await self._event("BackOff", f'Back-off pulling image "{image}"')
                await self._refused(record, "ImagePullBackOff", words)
            await self._comes(image)
        await self._event("Pulled", f'Successfully pulled image "{image}"')

    async def _comes(self, image: str) -> None:
        """Return once an image is there, or it is time to try again."""
        assert self._resources is not None
        for _ in range(round(_BACK_OFF / _AGAIN)):
            if self._resources.images.get(image, "there") == "there":
                return
            await self._pause(_AGAIN)

    async def _refused(self, record: Record, reason: str, words: str) -> None:
        """Say that a container cannot be started, and go on trying."""
        record.waits(reason, words)
        await self._event("Failed", f"Error: {reason if 'Pull' in reason else words}", "Warning")
        await self._report()

    async def _container(self, record: Record) -> int:
        """Run it until it is not started again; return its last exit status."""
        name = record.container["name"]
        await self._pull(record)
        while True:
            self._go_on()
            status = await self._once(record)
            again = {"Always": True, "OnFailure": status != 0}.get(self._pod["spec"]["restartPolicy"], False)
            if self._stop.done() or not again or ("is_init" in record.container and not status):
                return status
            await self._report()
            metadata = self._pod["metadata"]
            about = f"{metadata['name']}_{metadata['namespace']}({metadata['uid']})"
            record.waits("CrashLoopBackOff", f"back-off 10s restarting failed container={name} pod={about}")
            words = f"Back-off restarting failed container {name} in pod {about}"
            await self._event("BackOff", words, "Warning")
            await self._report()
            await self._pause(_BACK_OFF)
            record.restarts += 1

    async def _once(self, record: Record) -> int:
        name = record.container["name"]
        words_file = self._place.folder / f"words-{name}-{record.restarts}"
        words_file.touch()
        words_file.chmod(0o666)
        running = await self._start(record, words_file)
        self._running[name] = running
        if self._stop.done():
            running.send(signal.SIGKILL)
        await self._event("Created", f"Container created: {name}")
        record.runs()
        told = asyncio.create_task(self._began(name, running))
        code = await running.wait()
        await told
        del self._running[name]
        if why := running.start_error():
            why = f"{_NOT_STARTED} {why}"
            await self._event("Failed", f"Error: {why}", "Warning")
            record.ended(128, "StartError", why)
            return 128
        reason = self._killed_for.pop(name, "Error" if code else "Completed")
        record.ended(code, reason, self._last_words(record, words_file, code))
        return code

    async def _began(self, name: str, running: Running) -> None:
        if await running.has_begun():
            await self._event("Started", f"Container started: {name}")
            await self._report()

    async def _start(self, record: Record, words: Path) -> Running:
        assert self._resources is not None
        assert self._volumes is not None
        assert self._sandbox is not None
        image, told = self._resources.image, ""
        layer = image.folder / self._pod["metadata"]["uid"] / f"{record.container['name']}-{record.restarts}"
        while True:
            try:
                found = await container_of(
                    self._core, self._pod, record.container, self._place, image, self._volumes, words
                )
                return await start(found, self._sandbox, image, layer, self._log(record))
            except NotYet as trouble:
                if str(trouble) != told:
                    told = str(trouble)
                    await self._refused(record, "CreateContainerConfigError", told)
            except aiohttp.ClientError:
                pass
            await self._pause(_AGAIN)

    def _log(self, record: Record) -> Path:
        return self._place.folder / f"log-{record.container['name']}-{record.restarts}"

    def _last_words(self, record: Record, file: Path, code: int) -> str:
        """Return what it said last: in its file, or else, if it has failed and wants so, in its log."""
        said = file.read_bytes()[:4096]
        if not said and code and record.container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            log = self._log(record).read_bytes().splitlines(keepends=True)
            said = b"".join(log[-80:])[-2048:]
        return said.decode(errors="replace")

    def _end_phase(self) -> str:
        return "Failed" if any(each.code != 0 for each in self._containers) else "Succeeded"

    async def _report(self, phase: str = "", reason: str = "", message: str = "") -> None:
        if self._stop.done() and not phase:
            return  # how it ends is told once, when it has
        async with self._reporting:  # what was seen later is told later
            await self._write("patch_namespaced_pod_status", {"status": self._status(phase, reason, message)})

    def _status(self, phase: str, reason: str, message: str) -> dict[str, Any]:
        policy = self._pod["spec"]["restartPolicy"]
        phase = phase or phase_of(self._inits, self._containers, policy)
        addresses = {"podIP": self._address, "podIPs": [{"ip": self._address}]} if self._address else {}
        return {
            "phase": phase,
            "hostIP": "127.0.0.1",
            **addresses,
            "startTime": self._started,
            "conditions": conditions_of(self._inits, self._containers, phase),
            "initContainerStatuses": [each.status() for each in self._inits],
            "containerStatuses": sorted((each.status() for each in self._containers), key=itemgetter("name")),
            **({"reason": reason, "message": message} if reason else {}),
        }

    async def _write(self, method: str, body: Manifest) -> None:
        metadata = self._pod["metadata"]
        if "status" in body:
            body = {"metadata": {"uid": metadata["uid"]}, **body}
        while True:
            try:
                # To make a model of the answer, which nobody reads, would take longer than all the rest.
                answer = await getattr(self._core, method)(
                    metadata["name"], metadata["namespace"], body=body, _preload_content=False
                )
                await answer.read()
            except aiohttp.ClientError:  # the API server is away: a kubelet tries again
                await asyncio.sleep(_AGAIN)
                continue
            # It is gone, or another one has its name by now.
            if answer.status >= 400 and answer.status not in (404, 409):
                raise ApiException(status=answer.status, reason=await answer.text())
            return

    async def _event(self, reason: str, message: str, kind: str = "Normal") -> None:
        metadata = self._pod["metadata"]
        body = event(metadata, self.node, reason, message, kind)
        with contextlib.suppress(ApiException, aiohttp.ClientError):  # its namespace is being deleted
            await self._core.create_namespaced_event(metadata["namespace"], body)
