"""A namespace with the routers' ServiceAccount as the chart makes it, and what the kubelet mounts into a router."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.router.cluster.objects import Object
from tests.support.api_server import ApiServer

ROOT = Path(__file__).parents[3]
RULES = ROOT / "charts" / "kvferry" / "files" / "rbac" / "router.yaml"
ACCOUNT = "kvferry-router"
RBAC = "rbac.authorization.k8s.io"
SLICES = "discovery.k8s.io/v1"


class Place:
    """A namespace, and the folder of its routers' ServiceAccount."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path) -> None:
        self.server = server
        self.namespace = namespace
        self.account = folder / "serviceaccount"
        self.account.mkdir()
        (self.account / "ca.crt").write_text((server.folder / "server.crt").read_text())
        server.service_account(namespace, ACCOUNT)
        self.bring_token()

    def environment(self) -> dict[str, str]:
        """What the kubelet tells each container of the API server."""
        host, port = self.server.url.removeprefix("https://").split(":")
        return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    def bring_token(self) -> None:
        """A fresh token, as the kubelet brings it: whole, by a rename."""
        draft = self.account / ".token"
        draft.write_text(self.server.token_for(self.namespace, ACCOUNT))
        draft.replace(self.account / "token")

    def bind(self) -> None:
        """The Role with the rules that the chart has, and its binding to the account alone."""
        metadata = {"name": ACCOUNT, "namespace": self.namespace}
        role = {"kind": "Role", "metadata": metadata, "rules": yaml.safe_load(RULES.read_text())}
        binding = {
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": self.namespace}],
        }
        self.server.apply_all([{"apiVersion": f"{RBAC}/v1", **made} for made in (role, binding)])

    def start_server(self) -> None:
        """Start the API server again. The loop waits: the kernel ends the server with the thread that started it."""
        self.server.start()

    async def put(self, made: Object) -> None:
        """Write a slice as the endpoint slice controller does."""
        await self._off_the_loop(self.server.client.apply, self._own(made))

    async def delete(self, name: str) -> None:
        wanted = {"apiVersion": SLICES, "kind": "EndpointSlice", "metadata": {"name": name}}
        await self._off_the_loop(self.server.client.delete, self._own(wanted))

    def _own(self, made: Object) -> Object:
        metadata = made["metadata"] | {"namespace": self.namespace}
        metadata.pop("uid", None)
        endpoints = [
            endpoint | {"targetRef": endpoint["targetRef"] | {"namespace": self.namespace}}
            for endpoint in made.get("endpoints", ())
        ]
        return made | {"metadata": metadata} | ({"endpoints": endpoints} if endpoints else {})

    async def _off_the_loop(self, call: Callable[..., Any], *arguments: Any) -> None:
        await asyncio.to_thread(call, *arguments)


@pytest.fixture
def place(api_server: ApiServer, tmp_path: Path) -> Place:
    """With the rights that the chart gives."""
    made = Place(api_server, api_server.namespace(), tmp_path)
    made.bind()
    return made


@pytest.fixture
def bare_place(api_server: ApiServer, tmp_path: Path) -> Place:
    """The account without any right."""
    return Place(api_server, api_server.namespace(), tmp_path)
