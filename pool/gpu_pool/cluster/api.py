"""The Kubernetes API in JSON: requests, watches, writes that are retried, and the errors they end with.

Objects stay what the API shows, plain JSON: a client's classes would cost
more time than everything else when thousands of pods are watched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from urllib.request import getproxies

from aiohttp import ClientConnectorCertificateError, ClientError, ClientResponse, ClientSession, ClientTimeout

from gpu_pool.cluster.api_access import ApiAccess, ClientAccess, PodAccess, by_kubeconfig
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.pod_troubles import denial, violation
from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool_client import NotAllowed, PoolUnreachable
from gpu_pool_client._retries import Backoff

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

#: Seconds in which a connection must be made.
_CONNECT_WITHIN: Final = 10.0
#: Seconds in which an answer must have come then.
_ANSWER_WITHIN: Final = 15.0
#: Answers after which the same question may be answered later: too many requests, and a server in trouble.
_LATER: Final = (429, 500, 502, 503, 504)
#: Bytes of an event that can be read: more than etcd keeps of an object.
_LONGEST_LINE: Final = 2**21
#: OpenSSL's numbers for what a strict verification finds amiss with the form of a certificate.
_FORM: Final = range(80, 94)
_JSON: Final = "application/json"
#: What a change is written in: what is named is replaced.
_MERGE: Final = "application/merge-patch+json"
#: Asks for objects without what is in them: a list, and the events of a watch.
_NAMES: Final = {
    "LIST": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
    "WATCH": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
}


class ApiAway(Exception):
    """The API server did not answer, or not sensibly. Asking again may help."""

    def __init__(self, message: str, *, too_lax: bool = False, no_such_path: bool = False) -> None:
        #: Whether nothing but the form of its certificates is amiss, see :func:`connect`.
        self.too_lax = too_lax
        #: Whether nobody serves that path: so says an API server of versions that it does not have, and so
        #: says a load balancer, or a gateway to several clusters, that has lost the API server.
        self.no_such_path = no_such_path
        super().__init__(message)


class ApiRefused(Exception):
    """The API server said no: an HTTP status, Kubernetes' word for the reason, and its words."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message
        super().__init__(f"{status} {reason}: {message}"[:1_000])


class Api:
    """The API of one cluster, as the pool's service may use it. Made by :func:`connect`."""

    def __init__(self, access: ApiAccess, namespace: str) -> None:
        self._access = access
        self._session = ClientSession(
            connector=access.connector,
            connector_owner=False,
            # Looking for proxies takes as long as all the rest of a request, so it is done once.
            trust_env=bool(getproxies()),
            read_bufsize=_LONGEST_LINE,
        )
        #: The namespace that the configuration names.
        self.namespace = namespace
        #: Requests so far by method, lists and watches by these names.
        self.counts: dict[str, int] = {}

    @classmethod
    def of(cls, client: ApiClient, namespace: str = "") -> Api:
        """Return the API that Kubernetes' client was told to ask."""
        return cls(ClientAccess(client), namespace)

    @property
    def url(self) -> str:
        """Where the API server is."""
        return self._access.url

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        await self._access.close()

    async def list(self, path: str, query: Mapping[str, str], *, names_only: bool = False) -> Any:
        """Return one page of a list. Raises as :meth:`ask` does, and ``ApiAway`` for what is no list."""
        accept = _NAMES["LIST"] if names_only else _JSON
        page = await self.ask("GET", path, query=query, counted="LIST", accept=accept)
        # Whatever else answers in the API server's place must not be taken for a cluster without objects.
        if not isinstance(page, dict) or "items" not in page:
            raise ApiAway("an answer that is no list")
        return page

    async def ask(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        *,
        query: Mapping[str, str] | None = None,
        counted: str = "",
        accept: str = _JSON,
    ) -> Any:
        """Return the object that is answered. Raises ``ApiAway`` and ``ApiRefused``."""
        self._count(counted or method)
        return _read(*await self._answer(method, path, body, query or {}, accept))

    async def log(self, path: str, most: int) -> str:
        """Return how the log of a pod begins, so many bytes at most. Raises as :meth:`ask` does."""
        self._count("LOG")
        status, text = await self._answer("GET", f"{path}/log", None, {"limitBytes": str(most)}, _JSON)
        if status >= 400:
            _read(status, text)
        return text.decode(errors="replace")

    async def _answer(
        self, method: str, path: str, body: Manifest | None, query: Mapping[str, str], accept: str
    ) -> tuple[int, bytes]:
        try:
            answer = await self._send(method, path, body, query, _ANSWER_WITHIN, accept)
            async with answer:
                return answer.status, await answer.read()
        except (ClientError, OSError, asyncio.TimeoutError, ssl.SSLError) as error:
            raise _away(error) from error

    async def watch(
        self, path: str, query: Mapping[str, str], seconds: float, *, names_only: bool = False
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield events until the server ends the watch. Raises ``ApiAway`` and ``ApiRefused``."""
        asked = {**query, "watch": "1", "timeoutSeconds": str(int(seconds))}
        try:
            self._count("WATCH")
            accept = _NAMES["WATCH"] if names_only else _JSON
            answer = await self._send("GET", path, None, asked, seconds + _ANSWER_WITHIN, accept)
            async with answer:
                if answer.status >= 400:
                    _read(answer.status, await answer.read())
                try:
                    async for line in answer.content:
                        yield json.loads(line)
                finally:
                    _hang_up(answer)
        except (ClientError, OSError, asyncio.TimeoutError, ssl.SSLError, ValueError) as error:
            raise _away(error) from error

    async def _send(
        self,
        method: str,
        path: str,
        body: Manifest | None,
        query: Mapping[str, str],
        within: float,
        accept: str,
    ) -> ClientResponse:
        headers = {"Accept": accept, "Content-Type": _MERGE if method == "PATCH" else _JSON}
        try:
            authorization = await self._access.authorization()
        except Exception as error:  # such as of a kubeconfig's own program, which may fail in any way
            raise ApiAway(f"no credentials for it: {type(error).__name__}: {error}"[:1_000]) from error
        if authorization:
            headers["Authorization"] = authorization
        return await self._session.request(
            method,
            f"{self._access.url}{path}{'?' if query else ''}{urlencode(query)}",
            headers=headers,
            data=None if body is None else json.dumps(body),
            # Many may wait here for a connection to be free: that is not the server's fault.
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_WITHIN, sock_read=within),
            **self._access.options,
        )

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def _away(error: Exception) -> ApiAway:
    cause = error.certificate_error if isinstance(error, ClientConnectorCertificateError) else error
    if isinstance(cause, ssl.SSLCertVerificationError) and cause.verify_code in _FORM:
        return ApiAway(
            f"its certificates lack extensions that this Python requires ({cause.verify_message}); with "
            "c.KubernetesSettings.lax_certificates = True they are accepted, and still verified",
            too_lax=True,
        )
    return ApiAway(f"{type(error).__name__}: {error}")


def _hang_up(answer: ClientResponse) -> None:
    """Leave a watch at once: nobody reads what the server would still say."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


_NO_SUCH_PATH: Final = 404


def _read(status: int, text: bytes) -> Any:
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise ApiAway(f"HTTP {status}, without JSON", no_such_path=status == _NO_SUCH_PATH) from error
    if status < 400:
        return found
    said = found if isinstance(found, dict) else {}
    refused = ApiRefused(status, str(said.get("reason", "")), str(said.get("message", "")))
    if status in _LATER:
        raise ApiAway(str(refused))
    if status == _NO_SUCH_PATH and said.get("kind") != "Status":
        raise ApiAway(f"not in the form of an API server's answers: {refused}", no_such_path=True)
    raise refused


async def connect(kubeconfig: str = "", *, lax: bool = False) -> Api:
    """Return the API of the cluster that this process runs in, or that a kubeconfig names.

    ``kubeconfig`` wins, then ``$KUBECONFIG``, then the pod's own service account. With ``lax``, the
    API server's certificates need not have every extension that Python 3.13 and newer want; who signed
    them, for whom and until when is verified all the same.
    Raises ``PoolUnreachable`` where there is none of them.
    """
    file = kubeconfig or os.environ.get("KUBECONFIG", "")
    try:
        if file:
            access, namespace = await by_kubeconfig(file, lax=lax)
            return Api(access, namespace)
        account = PodAccess(lax=lax)
    except (OSError, ValueError, TypeError) as error:
        raise PoolUnreachable(
            f"There is no cluster to serve: {error}",
            "Run the service in a pod with a service account, or set KUBECONFIG.",
        ) from error
    return Api(account, account.namespace)


#: Seconds after the first attempt that failed; they double with each further one,
_FIRST_PAUSE: Final = 0.2
#: up to so many.
_LONGEST_PAUSE: Final = 10.0
#: Pods that are being deleted at the same time; the others wait here.
_AT_ONCE: Final = 16
_NOT_FOUND, _CONFLICT = 404, 409
#: Answers that say only that an object is there already, or is not there.
_NO_OBJECT: Final = {("POST", "AlreadyExists"), ("GET", "NotFound"), ("PATCH", "NotFound")}


class ApiWriter:
    """Creates and deletes objects."""

    def __init__(self, api: Api, times: ClusterTimes, log: logging.Logger) -> None:
        self._api, self._times, self._log = api, times, log
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def create(self, path: str, body: Manifest) -> Any:
        """Create an object and return it; None if there is one of that name.

        Raises ``NotAllowed`` with the cluster's words where it refuses, and ``PoolUnreachable``.
        """
        return await self._retrying("POST", path, body)

    async def change(self, path: str, changes: Manifest) -> Any:
        """Change an object where it differs from this, and return it; None if it is not there.

        Raises as :meth:`create` does.
        """
        return await self._retrying("PATCH", path, changes)

    async def read(self, path: str) -> Any:
        """Return an object, None if it is not there. Raises as :meth:`create` does."""
        return await self._retrying("GET", path)

    async def delete(self, found: Manifest, where: str = "") -> bool:
        """Delete a pod, however long it takes until there is an answer; return whether it is done.

        ``where`` is the path of objects of another kind.
        """
        metadata, backoff = found["metadata"], _backoff()
        path = f"{where or path_of(metadata['namespace'], 'pods')}/{metadata['name']}"
        body = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        while True:
            try:
                async with self._slots:
                    await self._api.ask("DELETE", path, body)
            except ApiRefused as refused:  # noqa: PERF203 - what is waited for takes seconds
                if refused.status in (_NOT_FOUND, _CONFLICT):  # the latter: another one has its name
                    return True
                self._log.error("%s cannot be deleted: %s", metadata["name"], refused)
                return False
            except ApiAway:
                await backoff.wait()
            else:
                return True

    async def _retrying(self, method: str, path: str, body: Manifest | None = None) -> Any:
        give_up_at, backoff = time.monotonic() + self._times.retried_for, _backoff()
        while True:
            try:
                return await self._api.ask(method, path, body)
            except ApiRefused as refused:
                if (method, refused.reason) in _NO_OBJECT:
                    return None
                if refused.reason != "Conflict":  # as of a quota that another one wrote at the same time
                    self._log.error(
                        "The cluster refused %s %s: %s", method, path, _for_administrator(refused)
                    )
                    raise _refusal(refused) from refused
                why: Exception = refused
            except ApiAway as away:
                why = away
            if time.monotonic() > give_up_at:
                raise PoolUnreachable(
                    "The cluster does not answer at the moment, so the kernel could not be started.",
                    "Your slice is kept. Try again in a minute.",
                ) from why
            await backoff.wait()


def _backoff() -> Backoff:
    return Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)


def path_of(namespace: str, kind: str) -> str:
    """Return where objects of the core group are."""
    return f"/api/v1/namespaces/{namespace}/{kind}"


def _refusal(refused: ApiRefused) -> NotAllowed:
    """Say in words what the cluster refused: a quota, a policy, or a right that the service lacks."""
    if violation(refused.message) or denial(refused.message):
        return NotAllowed(
            "The security rules of the cluster do not allow this kernel.",
            "Tell the administrator: the log of the pool's service has what to set.",
        )
    return NotAllowed(
        f"The cluster refused to start the kernel: {' '.join(refused.message.split())[:400]}",
        "Tell the administrator: the log of the pool's service has this message, too.",
    )


def _for_administrator(refused: ApiRefused) -> str:
    """Return the cluster's own words, with what to do about them where that is known."""
    denied = denial(refused.message)
    if denied is not None:
        return (
            f"The admission policy {denied.policy} refuses the kernel's {denied.kind}: {denied.why}. "
            "Either the policy is of another release than this service: apply that of this one. Or something "
            "in the cluster has changed what was created, such as a webhook: configure that not to add what "
            "is named, or allow it (admissionPolicy.secrets and .hostPaths of the chart, or the "
            "first variables of service/admissionpolicy.yaml)."
        )
    found = violation(refused.message)
    if found is None:
        return str(refused)
    return (
        f"Pod Security ({found.level}) refuses the kernel's pod: {found.rules}. The pod complies with all "
        "of its rules as it is created here, so something in the cluster has changed it, such as the "
        "webhook of a GPU-sharing system. Configure that not to add what is listed, or label the namespace "
        "pod-security.kubernetes.io/enforce with a level that allows it."
    )
