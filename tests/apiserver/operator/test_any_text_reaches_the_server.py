"""Text of any alphabet in what is applied."""

from kubernetes.aio.client import ApiClient

from kvferry_operator.shell.api import KubeApi
from kvferry_operator.shell.kinds import kind_of
from tests.apiserver.operator.install import Installation
from tests.support.api_server import ApiServer

TEXT = "größer 大 🚢 \\ \\u0041 \" ' # - : \n\t\r \u2028 \x01 \x7f\x80\x85\x9f \ufeff \ufffe \\\x7f"


async def test_what_is_applied_is_what_is_there(
    api_server: ApiServer, everywhere: Installation, client: ApiClient
) -> None:
    """Letters beyond ASCII and beyond two bytes, quotes and control characters come back as they were given."""
    namespace = everywhere.add_namespace()
    wanted = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "text", "namespace": namespace, "annotations": {"example.com/note": TEXT}},
        "data": {"text": TEXT},
    }
    await KubeApi(client, lambda: 60.0).apply(kind_of("ConfigMap"), wanted, "test")
    found = api_server.client.get(wanted)
    assert found["data"]["text"] == TEXT
    assert found["metadata"]["annotations"]["example.com/note"] == TEXT
