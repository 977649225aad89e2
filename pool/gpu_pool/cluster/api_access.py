"""How an API server is reached, and in whose name it is asked.

A pod's own service account is three files. They are read here and not by Kubernetes' client, whose import
takes a fifth of the time in which a service starts.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import BaseConnector, TCPConnector

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

#: Connections at most, watches included: a server that is busy has no use for more.
CONNECTIONS: Final = 48
#: Where a kubelet puts the account of a pod.
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Seconds after which the token is read again. A kubelet renews it long before its end.
_READ_EVERY: Final = 60.0


class ApiAccess(Protocol):
    """How one API server is asked."""

    @property
    def url(self) -> str:
        """Where it is, such as ``https://10.0.0.1:443``."""

    @property
    def connector(self) -> BaseConnector | None:
        """Its connections. Whoever asks closes them by :meth:`close`."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What aiohttp is told of each request besides: a proxy, or the name in the server's certificate."""

    async def authorization(self) -> str | None:
        """Return the header by which whoever asks is known; None where it is not by one."""

    async def close(self) -> None:
        """Close all connections."""


class PodAccess:
    """As the service account of the pod that this process runs in."""

    options: Mapping[str, Any] = {}

    def __init__(
        self,
        folder: Path = _ACCOUNT,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        *,
        lax: bool = False,
    ) -> None:
        """Read the account.

        Parameters
        ----------
        folder
            Where its token, the certificate of the cluster's authority and its namespace are.
        environment
            What says where the API server is.
        clock
            Seconds, by which the token is read again.
        lax
            Whether the API server's certificate need not have every extension that Python 3.13 wants.

        Raises
        ------
        OSError, ValueError
            Where this is no pod, or its account is not complete.
        """
        host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port:
            raise ValueError("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set.")
        self.url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self.namespace = (folder / "namespace").read_text().strip()
        self._file, self._clock = folder / "token", clock
        self._token, self._read_at = self._read(), clock()
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        if lax:
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        self.connector = TCPConnector(limit=CONNECTIONS, ssl=context)

    async def authorization(self) -> str:
        """See :class:`ApiAccess`."""
        if self._clock() >= self._read_at + _READ_EVERY:
            self._read_at = self._clock()
            with suppress(OSError, ValueError):  # the one before is good for much longer
                self._token = self._read()
        return f"Bearer {self._token}"

    def _read(self) -> str:
        token = self._file.read_text().strip()
        if not token:
            raise ValueError(f"{self._file} is empty.")
        return token

    async def close(self) -> None:
        """See :class:`ApiAccess`."""
        await self.connector.close()


class ClientAccess:
    """As Kubernetes' client was told to."""

    def __init__(self, client: ApiClient) -> None:
        self._client, sent_by = client, client.rest_client
        self.url = str(client.configuration.host)
        self.connector = sent_by.pool_manager.connector
        self.options: Mapping[str, Any] = {
            "proxy": sent_by.proxy,
            "proxy_headers": sent_by.proxy_headers,
            "server_hostname": sent_by.server_hostname,
        }

    async def authorization(self) -> str | None:
        """See :class:`ApiAccess`."""
        found: str | None = await self._client.configuration.get_api_key_with_prefix("BearerToken")
        return found

    async def close(self) -> None:
        """See :class:`ApiAccess`."""
        await self._client.close()


async def by_kubeconfig(file: str, *, lax: bool = False) -> tuple[ClientAccess, str]:
    """Return the access that a kubeconfig describes, and the namespace that it names.

    ``lax`` as for :class:`PodAccess`. Raises ``ValueError``, ``OSError`` or ``TypeError`` for one that cannot
    be read.
    """
    # Imported here because a service in a pod does without, and starts that much sooner.
    from kubernetes_asyncio.client import ApiClient, Configuration
    from kubernetes_asyncio.config import ConfigException, load_kube_config

    configuration = Configuration()
    configuration.disable_strict_ssl_verification = lax
    configuration.connection_pool_maxsize = CONNECTIONS
    try:
        loader = await load_kube_config(file, client_configuration=configuration)
    except ConfigException as error:
        raise ValueError(str(error)) from error
    namespace = str((loader.current_context or {})["context"].get("namespace") or "default")
    return ClientAccess(ApiClient(configuration)), namespace
