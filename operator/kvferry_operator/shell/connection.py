"""Where the API server is and who we are there: the pod's own account, or a kubeconfig outside of a cluster."""

import os

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

CONNECTIONS = 64  # at once, of one client
KEEPALIVE_S = 60.0


class ConnectionSettingsError(ValueError):
    """There is no way to an API server."""


async def load(kubeconfig: str | None = None) -> Configuration:
    """The connection's settings. Tokens that the kubelet exchanges are read again by the library.

    Args:
        kubeconfig: this file, whatever the environment says.

    Raises:
        ConnectionSettingsError: neither a pod's account nor a usable kubeconfig is there.
    """
    made = Configuration()
    made.connection_pool_maxsize = CONNECTIONS
    made.retries = None  # the queue's business
    # Else each request asks the environment for proxies, in a thread; a kubeconfig may name one.
    made.client_session_kwargs = {"trust_env": False}
    try:
        if kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=made)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(kubeconfig, client_configuration=made, persist_config=False)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise ConnectionSettingsError(
            f"no API server to talk to: {error}. In a pod its account is used, elsewhere KUBECONFIG or ~/.kube/config"
        ) from None
    return made


def session(settings: Configuration, traces: list[aiohttp.TraceConfig]) -> aiohttp.ClientSession:
    """A session for the watch layer, which only builds requests: it shows our token and checks the server's name."""
    client = ApiClient(settings)

    async def authenticated(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        if token := await settings.get_api_key_with_prefix("BearerToken", alias="authorization"):
            request.headers["Authorization"] = token
        return await handler(request)

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=client.rest_client.ssl_context, limit=0, keepalive_timeout=KEEPALIVE_S),
        middlewares=(authenticated,),
        trace_configs=traces,
        headers={"User-Agent": "kvferry-operator"},
    )
