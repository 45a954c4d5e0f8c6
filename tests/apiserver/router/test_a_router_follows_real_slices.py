"""A router under its own account before a real API server: real EndpointSlices, lists, watches, tokens and rights."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.router.cluster.objects import make_endpoint, make_slice
from tests.router.cluster.whole import running, slice_of
from tests.router.harness import Router, until
from tests.router.scripted_pod import Script, ScriptedPod
from tests.support.kube_client import Refused

from .conftest import ACCOUNT, SLICES, Place

START_S = 30.0  # of an API server that starts again beside other tests


@asynccontextmanager
async def routed(
    place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch, *pods: ScriptedPod
) -> AsyncIterator[Router]:
    """Pods in slices, and a router that finds the API server as in a pod."""
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    try:
        for number, pod in enumerate(pods, 1):
            await pod.start()
            await place.put(slice_of(pod, number))
        flags = ("--service-account-dir", str(place.account))
        async with running(folder, None, monkeypatch, *flags, namespace=place.namespace) as router:
            yield router
    finally:
        for pod in pods:
            await pod.stop()


async def becomes(read: Callable[[], Awaitable[Any]], expected: Any, seconds: float = 5.0) -> None:
    async def equal() -> bool:
        return bool(await read() == expected)

    await until(equal, seconds)


async def reason(router: Router) -> str:
    """Why the router is not ready; empty when it is."""
    async with router.session.get(router.url + "/readyz") as response:
        return "" if response.status == 200 else str((await response.json())["reason"])


async def ask(router: Router) -> str:
    """One request; returns the pod that decoded it."""
    async with router.complete("hello") as response:
        assert response.status == 200, await response.text()
    return str((await router.decisions())[0]["decode"])


async def test_a_pod_that_turns_unready_is_dropped_within_a_second(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the event of a real watch; the stream on it goes on to its end, also after the slice is deleted."""
    d1, d2 = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    p1 = ScriptedPod("p1", "prefill")
    async with routed(place, tmp_path, monkeypatch, d1, d2, p1) as router:
        await router.wait_pods(3)
        await place.put(slice_of(d2, 2, ready=False))
        await router.wait_pods(2)
        d1.default["decode"] = Script(pause_s=0.05)
        async with router.complete("x" * 40, stream=True) as response:
            assert await response.content.readany()
            await place.put(slice_of(d2, 2))
            await router.wait_pods(3)
            loop = asyncio.get_running_loop()
            await place.put(slice_of(d1, 1, ready=False, serving=True, terminating=True))
            written_at = loop.time()
            await router.wait_pods(2)
            assert loop.time() - written_at < 1.0
            assert {await ask(router) for _ in range(3)} == {"d2"}
            await place.delete("s-d1")
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        assert d1.broken == []


async def test_the_account_may_follow_slices_of_its_namespace_and_nothing_else(place: Place) -> None:
    """The chart's rules, as the API server understands them."""
    client = place.server.client_of(place.server.token_for(place.namespace, ACCOUNT))
    assert client.list(SLICES, "EndpointSlice", place.namespace) == []
    for api_version, kind in (("v1", "Secret"), ("v1", "Pod"), ("v1", "ConfigMap"), ("v1", "Service")):
        with pytest.raises(Refused, match="is forbidden"):
            client.list(api_version, kind, place.namespace)
    with pytest.raises(Refused, match="is forbidden"):
        client.list(SLICES, "EndpointSlice", "default")
    with pytest.raises(Refused, match="is forbidden"):
        client.create({"apiVersion": SLICES, **make_slice("s", namespace=place.namespace)})


async def test_a_missing_right_is_told_and_granted_without_a_restart(
    bare_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router is not ready and says why; then it is."""
    d1 = ScriptedPod("d1", "decode")
    async with routed(bare_place, tmp_path, monkeypatch, d1) as router:
        await becomes(lambda: reason(router), "the API server has not told of any pods yet (forbidden)")
        await asyncio.to_thread(bare_place.bind)
        await becomes(lambda: reason(router), "")
        assert await ask(router) == "d1"


async def test_serving_goes_on_while_the_api_server_is_down(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the pods known; what changes afterwards is heard again."""
    d1, d2 = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    async with routed(place, tmp_path, monkeypatch, d1, d2) as router:
        await router.wait_pods(2)

        async def connected() -> float:
            return await router.metric("router_discovery_connected")

        place.server.stop()
        try:
            await becomes(connected, 0.0)
            assert await reason(router) == ""
            d1.ready = False
            await router.wait_pods(1)
            assert {await ask(router) for _ in range(3)} == {"d2"}
            d1.ready = True
            await router.wait_pods(2)
        finally:
            place.start_server()
        await becomes(connected, 1.0, START_S)
        await place.delete("s-d1")
        await becomes(lambda: ask(router), "d2")
        await router.wait_pods(1)


async def test_a_revoked_token_is_replaced_by_the_one_that_the_kubelet_brings(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account made anew voids all tokens of the old one: 401 until the file changes, then on without a restart."""
    d1 = ScriptedPod("d1", "decode")
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": ACCOUNT, "namespace": place.namespace},
    }
    async with routed(place, tmp_path, monkeypatch, d1) as router:
        await router.wait_pods(1)
        await asyncio.to_thread(place.server.client.delete, account)
        await asyncio.to_thread(place.server.service_account, place.namespace, ACCOUNT)
        # A watch that is open stays so; the next one, which a restart brings about, must show a token that is good.
        place.server.stop()
        place.start_server()

        async def refused() -> bool:
            return await router.metric("router_discovery_failures_total", reason="unauthorized") >= 1

        await until(refused, START_S)
        assert await ask(router) == "d1"
        await asyncio.to_thread(place.bring_token)
        await place.put(slice_of(d1, 1, ready=False))
        await becomes(lambda: reason(router), "no decode pod can be used: d1: not ready, says Kubernetes", START_S)


async def test_slices_of_a_neighbour_are_not_asked_for(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another InferenceService of the namespace has Services of its own."""
    d1, stranger = ScriptedPod("d1", "decode"), ScriptedPod("x1", "decode")
    async with routed(place, tmp_path, monkeypatch, d1) as router:
        await stranger.start()
        try:
            ports = {"http": stranger.port, "state": 5557}
            endpoint = make_endpoint("x1", "10.77.0.9")
            await place.put(make_slice("x-1", endpoint, service="demo2-decode", ports=ports))
            await place.put(slice_of(d1, 1, ready=False))
            await becomes(lambda: reason(router), "no decode pod can be used: d1: not ready, says Kubernetes")
            await place.put(slice_of(d1, 1))
            await router.wait_pods(1)
            assert {await ask(router) for _ in range(3)} == {"d1"}
        finally:
            await stranger.stop()
        assert stranger.info_calls == 0


async def test_the_api_server_takes_no_loopback_address_for_a_pod(place: Place) -> None:
    """Which is why these tests dial 127.0.0.1 for 10.77.0.x; the router refuses such addresses by itself, too."""
    with pytest.raises(Refused, match="may not be in the loopback range"):
        await place.put(make_slice("s", make_endpoint("d1", "127.0.0.1")))
