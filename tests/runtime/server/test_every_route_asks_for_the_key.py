"""A pod's routes: three are open, the rest need the bearer key, and without keys the internal ones are absent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import yarl
from aiohttp import web

from kvferry_runtime.engine.client import EngineClient
from kvferry_runtime.engine.messages import EngineConfig
from kvferry_runtime.server.app import build_pod_app
from kvferry_runtime.server.config import parse
from kvferry_runtime.server.metrics import PodMetrics
from kvferry_runtime.server.pod import Pod
from kvferry_service.http_app import HttpServer, listen
from kvferry_wire.keys import ServiceKeys

KEYS = ServiceKeys(http=bytes([1]) * 32, kv=bytes([2]) * 32, state=bytes([3]) * 32, hash=bytes([4]) * 32)
OPEN = {"/healthz", "/readyz", "/metrics"}


@asynccontextmanager
async def serving(
    keys: ServiceKeys | None, *flags: str
) -> AsyncIterator[tuple[aiohttp.ClientSession, web.Application]]:
    """A pod's application whose engine never starts."""
    config = parse(["toy", *flags])
    engine = EngineClient(EngineConfig(model="toy", model_digest="", threads=1))
    pod = Pod(config=config, engine=engine, metrics=PodMetrics(engine), model_digest="", port=0, version="0")
    app = build_pod_app(pod, keys)
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, config.limits, internal=True)
    await server.start(listener)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        yield client, app
    await server.close()
    await engine.close()


def routes_of(app: web.Application) -> list[tuple[str, str]]:
    return [
        (route.method, route.resource.canonical.replace("{name}", "x"))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]


async def test_without_the_key_every_route_but_three_is_401() -> None:
    """Enumerates what is registered: a new route is covered without being named here."""
    async with serving(KEYS) as (client, app):
        routes = routes_of(app)
        assert len(routes) >= 15
        for method, path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEYS.bearer()}"}):
                async with client.request(method, path, headers=headers) as response:
                    assert (response.status == 401) == (path not in OPEN), (path, response.status)


async def test_with_the_key_no_route_is_401() -> None:
    """The service's bearer key opens all; what the engine is needed for says 503 until it is there."""
    async with serving(KEYS) as (client, app):
        for method, path in routes_of(app):
            async with client.request(method, path, headers={"Authorization": f"Bearer {KEYS.bearer()}"}) as response:
                assert response.status in (200, 204, 400, 404, 503), (path, response.status)


async def test_without_keys_there_are_no_internal_routes() -> None:
    """``kvferry serve`` alone offers ``/v1``, health and metrics only."""
    async with serving(None) as (client, app):
        assert not [path for _, path in routes_of(app) if path.startswith("/internal")]
        async with client.post("/internal/v1/generate") as response:
            assert response.status == 404


@pytest.mark.parametrize("path", ["org/model", "org%2Fmodel", "a/b/c"])
async def test_a_models_name_may_hold_slashes(path: str) -> None:
    """The name is looked up whole, with its slashes, encoded or not."""
    name = path.replace("%2F", "/")
    async with serving(None, "--served-name", name) as (client, _app):
        async with client.get(yarl.URL(f"/v1/models/{path}", encoded=True)) as response:
            assert response.status == 200
            assert (await response.json())["id"] == name
        async with client.get("/v1/models/other/model") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
