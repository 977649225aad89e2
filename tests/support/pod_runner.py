"""The life of one pod on a node of the tests: from bound to ended. See node_agent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import aiohttp
import psutil
from kubernetes_asyncio.client import CoreV1Api
from kubernetes_asyncio.client.exceptions import ApiException

from support.pod_process import Manifest, NotYet, Place, command_of

#: Marks, in their environment, the processes of a pod: those too that left its process group.
MARK = "GPU_POOL_TESTS_POD"
#: Seconds until something that may have changed is looked at again.
_AGAIN = 0.1


@dataclass
class Stop:
    """Why a pod is ended before its time."""

    grace: float = 0.0
    #: Written down as the pod's, unless it is deleted.
    reason: str = ""
    message: str = ""
    deleted: bool = False
    #: Whether nobody is told, since the node is lost.
    silent: bool = False


class PodRunner:
    """Runs one pod, and reports of it."""

    def __init__(
        self, core: CoreV1Api, pod: Manifest, place: Place, images: Mapping[str, str], *, hollow: bool = False
    ) -> None:
        self._core, self._pod, self._place, self._images = core, pod, place, images
        self._hollow, self._ran = hollow, False
        self.node = str(pod["spec"]["nodeName"])
        self._stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._killed_for: dict[str, str] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._started = _now()
        self.task = asyncio.create_task(self._run())

    def stop(self, why: Stop) -> None:
        """End it; the first reason counts."""
        if not self._stop.done():
            self._stop.set_result(why)

    def kill(self, reason: str) -> None:
        """Kill its processes as the system does that has no memory left."""
        for name, process in self._processes.items():
            self._killed_for[name] = reason
            process.kill()

    async def _run(self) -> None:
        life = asyncio.create_task(self._idle() if self._hollow else self._live())
        waits: set[asyncio.Future[Any]] = {life, self._stop}
        deadline = self._pod["spec"].get("activeDeadlineSeconds")
        await asyncio.wait(waits, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
            await self._report(self._end_phase())
        else:
            await self._cut_short(life)
        if self._stop.done() and self._stop.result().deleted:
            await self.gone()

    async def _cut_short(self, life: asyncio.Task[None]) -> None:
        if not self._stop.done():
            grace = self._pod["spec"].get("terminationGracePeriodSeconds", 30)
            words = "Pod was active on the node longer than the specified deadline"
            self.stop(Stop(grace, "DeadlineExceeded", words))
        why = self._stop.result()
        await self._end(life, why.grace)
        if not why.deleted and not why.silent:
            await self._report("Failed", why.reason, why.message)

    async def _end(self, life: asyncio.Task[None], grace: float) -> None:
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM if grace else signal.SIGKILL)
        if not self._processes:
            life.cancel()
        await asyncio.wait({life}, timeout=grace or None)
        await self._sweep()
        with contextlib.suppress(asyncio.CancelledError):
            await life

    async def _idle(self) -> None:
        """Run nothing, for a test of many pods."""
        for container in self._pod["spec"]["containers"]:
            state = {"running": {"startedAt": self._started}}
            self._states[container["name"]] = _status(container, state, 0, ready=True)
        await self._report("Running")
        await asyncio.Event().wait()

    async def gone(self) -> None:
        """Report how it ended, and let it be deleted."""
        await self._report(self._end_phase())
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._pod["metadata"]["uid"]}}
        await self._write("delete_namespaced_pod", options)

    async def _live(self) -> None:
        spec = self._pod["spec"]
        await self._pull([*spec.get("initContainers", ()), *spec["containers"]])
        for container in spec.get("initContainers", ()):
            if await self._container(container):
                return
        await asyncio.gather(*(self._container(each) for each in spec["containers"]))
        await self._sweep()

    async def _sweep(self) -> None:
        if self._ran:
            await asyncio.to_thread(_kill_marked, self._pod["metadata"]["uid"])

    async def _pull(self, containers: list[Manifest]) -> None:
        for container in containers:
            image = container["image"]
            await self._event("Pulling", f'Pulling image "{image}"')
            reason = ""
            while (state := self._images.get(image, "there")) != "there":
                if state == "missing" and reason != "ErrImagePull":
                    reason = "ErrImagePull"
                    words = f'Failed to pull image "{image}": not found'
                    await self._event("Failed", words, "Warning")
                    self._waits(container, reason, words)
                    await self._report("Pending")
                await asyncio.sleep(_AGAIN)
            await self._event("Pulled", f'Successfully pulled image "{image}"')

    async def _container(self, container: Manifest) -> int:
        """Run it until it is not started again; return its last exit status."""
        restarts = 0
        while True:
            status = await self._once(container, restarts)
            again = {"Always": True, "OnFailure": status != 0}.get(self._pod["spec"]["restartPolicy"], False)
            if self._stopping or not again:
                return status
            restarts += 1
            await self._event("BackOff", "Back-off restarting failed container", "Warning")
            await asyncio.sleep(1)

    async def _once(self, container: Manifest, restarts: int) -> int:
        name, started = container["name"], _now()
        try:
            process = await self._start(container)
        except (OSError, ValueError) as error:
            self._ended(container, 128, "StartError", started, restarts, str(error))
            return 128
        self._processes[name] = process
        self._states[name] = _status(container, {"running": {"startedAt": started}}, restarts, ready=True)
        await self._event("Started", f"Container started: {name}")
        if all(each["name"] in self._states for each in self._pod["spec"]["containers"]):
            await self._report("Running")
        code = await process.wait()
        del self._processes[name]
        status = code if code >= 0 else 128 - code
        reason = self._killed_for.pop(name, "Error" if status else "Completed")
        kept = status != 0 and container.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        self._ended(container, status, reason, started, restarts, self._end_of_log() if kept else "")
        return status

    async def _start(self, container: Manifest) -> asyncio.subprocess.Process:
        command = None
        while command is None:
            try:
                command = await command_of(self._core, self._pod, container, self._place)
            except (NotYet, aiohttp.ClientError) as error:  # noqa: PERF203 - so it waits
                self._waits(container, "CreateContainerConfigError", str(error))
                await asyncio.sleep(_AGAIN)
        self._ran = True
        with (self._place.folder / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command.argv,
                cwd=command.folder,
                env={**command.environment, MARK: self._pod["metadata"]["uid"]},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end_of_log(self) -> str:
        """Return as much of the log as a kubelet keeps."""
        lines = (self._place.folder / "log").read_bytes().splitlines(keepends=True)[-80:]
        return b"".join(lines)[-2048:].decode(errors="replace")

    def _waits(self, container: Manifest, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        self._states[container["name"]] = _status(container, state, 0)

    def _ended(
        self, container: Manifest, status: int, reason: str, started: str, restarts: int, message: str = ""
    ) -> None:
        end = {"exitCode": status, "reason": reason, "startedAt": started, "finishedAt": _now()}
        state = {"terminated": {**end, "message": message}}
        self._states[container["name"]] = _status(container, state, restarts)

    def _end_phase(self) -> str:
        codes = [each["state"].get("terminated", {}).get("exitCode", 1) for each in self._states.values()]
        return "Failed" if any(codes) else "Succeeded"

    async def _report(self, phase: str, reason: str = "", message: str = "") -> None:
        ready = "True" if phase == "Running" else "False"
        conditions = [{"type": kind, "status": ready} for kind in ("ContainersReady", "Ready")]
        conditions.append({"type": "Initialized", "status": "True"})
        names = {each["name"] for each in self._pod["spec"]["containers"]}
        status = {
            "phase": phase,
            "hostIP": "127.0.0.1",
            "podIP": self._place.address,
            "podIPs": [{"ip": self._place.address}],
            "startTime": self._started,
            "conditions": conditions,
            "containerStatuses": [each for name, each in self._states.items() if name in names],
            **({"reason": reason, "message": message} if reason else {}),
        }
        await self._write("patch_namespaced_pod_status", {"status": status})

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
        about = {"kind": "Pod", "apiVersion": "v1"}
        about |= {key: metadata[key] for key in ("namespace", "name", "uid")}
        event = {
            "metadata": {"generateName": f"{metadata['name']}."},
            "involvedObject": about,
            "reason": reason,
            "message": message,
            "type": kind,
            "source": {"component": "kubelet", "host": self.node},
            "firstTimestamp": _now(),
            "lastTimestamp": _now(),
            "count": 1,
        }
        with contextlib.suppress(ApiException, aiohttp.ClientError):  # its namespace is being deleted
            await self._core.create_namespaced_event(metadata["namespace"], event)


def _status(container: Manifest, state: Manifest, restarts: int, *, ready: bool = False) -> dict[str, Any]:
    found = {"name": container["name"], "image": container["image"], "imageID": container["image"]}
    return {**found, "state": dict(state), "ready": ready, "started": ready, "restartCount": restarts}


def _kill_marked(uid: str) -> None:
    """Kill what is left of a pod's processes."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == uid:
                process.kill()


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
