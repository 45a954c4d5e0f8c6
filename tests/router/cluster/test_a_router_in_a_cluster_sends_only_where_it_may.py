"""A whole router before scripted pods that EndpointSlices name: selection follows the slices, streams do not end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.router.harness import Router, text_of, until
from tests.router.scripted_pod import Script, ScriptedPod

from .fake_api import FakeApi
from .objects import make_slice
from .whole import running, slice_of


class Cluster:
    """Pods, their slices, and the router."""

    def __init__(self, api: FakeApi, router: Router, pods: dict[str, ScriptedPod]) -> None:
        self.api = api
        self.router = router
        self.pods = pods
        self.numbers = {name: number for number, name in enumerate(pods, 1)}

    def say(self, name: str, **conditions: bool) -> None:
        """A pod's conditions change."""
        self.api.put(slice_of(self.pods[name], self.numbers[name], **conditions))

    async def reason(self) -> str:
        """Why the router is not ready; empty when it is."""
        async with self.router.session.get(self.router.url + "/readyz") as response:
            return "" if response.status == 200 else str((await response.json())["reason"])

    async def ask(self) -> str:
        """One request; returns the pod that decoded it."""
        async with self.router.complete("hello") as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["choices"][0]["text"] == "hello"
        return str((await self.router.decisions())[0]["decode"])


@asynccontextmanager
async def cluster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *pods: ScriptedPod, flags: tuple[str, ...] = (), wait: bool = True
) -> AsyncIterator[Cluster]:
    """All pods ready, in slices, and known to the router."""
    api = FakeApi(folder)
    try:
        for pod in pods:
            await pod.start()
        made = {pod.name: pod for pod in pods}
        for number, pod in enumerate(pods, 1):
            api.put(slice_of(pod, number))
        await api.start()
        async with running(folder, api.access, monkeypatch, *flags) as router:
            if wait:
                await router.wait_pods(len(pods))
            yield Cluster(api, router, made)
    finally:
        await api.stop()
        for pod in pods:
            await pod.stop()


async def same(read: Callable[[], Awaitable[Any]], expected: Any, seconds: float = 3.0) -> float:
    """Until what is read is as expected; returns how long it took."""
    begun = asyncio.get_running_loop().time()

    async def equal() -> bool:
        return bool(await read() == expected)

    await until(equal, seconds)
    return asyncio.get_running_loop().time() - begun


async def test_pods_are_found_and_named_as_kubernetes_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and decode by their Services; decisions and logs hold pod names."""
    pods = (ScriptedPod("demo-prefill-abc-1", "prefill"), ScriptedPod("demo-decode-abc-1", "decode"))
    async with cluster(tmp_path, monkeypatch, *pods) as made:
        async with made.router.complete("a longer prompt") as response:
            assert response.headers["x-kvferry-path"] == "disaggregated"
        decision = (await made.router.decisions())[0]
        assert (decision["prefill"], decision["decode"]) == ("demo-prefill-abc-1", "demo-decode-abc-1")
        assert await made.router.metric("router_discovery_connected") == 1


@pytest.mark.parametrize(
    "conditions", [{"ready": False}, {"ready": False, "serving": True, "terminating": True}], ids=["unready", "leaving"]
)
async def test_a_pod_that_the_slices_hold_back_gets_nothing_new_and_ends_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditions: dict[str, bool]
) -> None:
    """Within a second, though it answers its probe; its stream goes on, also when the slice names it no more."""
    d1, d2 = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    async with cluster(tmp_path, monkeypatch, d1, d2) as made:
        made.say("d2", ready=False)
        await made.router.wait_pods(1)
        d1.default["decode"] = Script(pause_s=0.03)
        async with made.router.complete("x" * 40, stream=True) as response:
            assert await response.content.readany()
            made.say("d2")
            await made.router.wait_pods(2)
            made.say("d1", **conditions)
            loop = asyncio.get_running_loop()
            told_at = loop.time()
            await made.router.wait_pods(1)
            assert loop.time() - told_at < 1.0
            for _ in range(5):
                assert await made.ask() == "d2"
            made.api.delete("s-d1")
            assert await made.ask() == "d2"
            rest = await response.content.read()
            assert rest.endswith(b"data: [DONE]\n\n")
        assert d1.broken == []
        assert len(d1.legs) == 1


async def test_a_whole_answer_comes_from_a_pod_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is missing after its end was announced."""
    d1 = ScriptedPod("d1", "decode")
    d1.default["decode"] = Script(pause_s=0.02)
    async with (
        cluster(tmp_path, monkeypatch, d1) as made,
        made.router.complete("abcdefghijklmnop", stream=True) as response,
    ):
        first = await response.content.readany()
        made.say("d1", ready=False, serving=True, terminating=True)
        await same(made.reason, "no decode pod can be used: d1: terminating, says Kubernetes")
        assert text_of(first + await response.content.read()) == "abcdefghijklmnop"


async def test_serving_goes_on_while_the_api_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready, with the pods known; each of them is judged by its own answers."""
    d1, d2 = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    async with cluster(tmp_path, monkeypatch, d1, d2) as made:
        await made.api.stop()

        async def connected() -> float:
            return await made.router.metric("router_discovery_connected")

        await same(connected, 0.0)
        assert await made.reason() == ""
        await made.ask()
        d1.ready = False
        await made.router.wait_pods(1)
        assert await made.ask() == "d2"
        d1.ready = True
        await made.router.wait_pods(2)
        await made.api.start()
        await same(connected, 1.0)
        assert await made.router.metric("router_discovery_failures_total", reason="connection") >= 1


async def test_readiness_waits_for_the_slices_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready is what would answer: not before the pods are known, and not without a decode pod."""
    d1, p1 = ScriptedPod("d1", "decode"), ScriptedPod("p1", "prefill")
    async with cluster(tmp_path, monkeypatch, d1, p1) as made:
        assert await made.reason() == ""
        made.api.delete("s-d1")
        await same(made.reason, "no decode pod can be used: there is none")
        made.api.delete("s-p1")
        await same(made.reason, "no pods are known")
        async with made.router.complete() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        made.say("d1")
        await same(made.reason, "")
    folder = tmp_path / "refused"
    folder.mkdir()
    api = FakeApi(folder)
    api.answers.extend([403] * 1000)
    await api.start()
    try:
        async with running(folder, api.access, monkeypatch) as router:
            refused = Cluster(api, router, {})
            await same(refused.reason, "the API server has not told of any pods yet (forbidden)")
            api.answers.clear()
            await same(refused.reason, "no pods are known")
    finally:
        await api.stop()


async def test_an_address_used_again_is_asked_anew_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of another uid at the same address starts without a record: it is described before it is used."""
    d1 = ScriptedPod("d1", "decode")
    async with cluster(tmp_path, monkeypatch, d1) as made:
        asked = d1.info_calls
        again = slice_of(d1, 1)
        again["endpoints"][0]["targetRef"]["uid"] = "another"
        made.api.put(again)

        async def described() -> bool:
            return d1.info_calls > asked

        await same(described, True)
        await made.router.wait_pods(1)
        again["endpoints"][0]["targetRef"] |= {"uid": "third", "name": "d9"}
        made.api.put(again)

        async def used() -> str:
            return await made.ask()

        await same(used, "d9")


async def test_foreign_endpoints_are_never_dialled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of another Service, of another namespace, or without a pod behind it."""
    d1, stranger = ScriptedPod("d1", "decode"), ScriptedPod("x1", "decode")
    await stranger.start()
    try:
        async with cluster(tmp_path, monkeypatch, d1) as made:
            ports = {"http": stranger.port, "state": stranger.state_port}
            bare = slice_of(stranger, 7)
            bare["endpoints"][0]["targetRef"] = None
            made.api.put(bare)
            made.api.put(make_slice("other", *slice_of(stranger, 8)["endpoints"], service="other", ports=ports))
            foreign = make_slice("far", *slice_of(stranger, 9)["endpoints"], namespace="far", ports=ports)
            made.api.send("ADDED", foreign)

            async def left_out() -> float:
                return await made.router.metric("router_discovery_left_out", reason="foreign")

            await same(left_out, 1.0)
            for _ in range(3):
                assert await made.ask() == "d1"
        assert stranger.info_calls == 0
    finally:
        await stranger.stop()


# ---- API keys from a mounted Secret ------------------------------------------------------------------------------


class MountedSecret:
    """A Secret as the kubelet mounts it: links to files in a dated folder, exchanged as a whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._number = 0
        folder.mkdir()

    def write(self, **entries: str) -> None:
        """Bring new content, as the kubelet does: one rename makes all of it current."""
        self._number += 1
        dated = self.path / f"..2026_08_0{self._number}"
        dated.mkdir()
        for name, content in entries.items():
            (dated / name).write_text(content)
        draft = self.path / "..data_tmp"
        draft.symlink_to(dated.name)
        draft.replace(self.path / "..data")
        for name in entries:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        for link in self.path.iterdir():
            if not link.name.startswith("..") and link.name not in entries:
                link.unlink()


async def test_keys_of_a_mounted_secret_rotate_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old key is refused and the new one let in within seconds; an emptied Secret lets nobody in."""
    secret = MountedSecret(tmp_path / "api-keys")
    secret.write(acme="old-key-of-acme-0001\n")
    flags = ("--auth", "api-keys", "--api-keys-file", str(secret.path))
    async with cluster(tmp_path, monkeypatch, ScriptedPod("d1", "decode"), flags=flags) as made:

        async def status(key: str) -> int:
            body = {"model": "toy", "prompt": "hello", "max_tokens": 5}
            url, headers = made.router.url + "/v1/completions", {"Authorization": f"Bearer {key}"}
            async with made.router.session.post(url, json=body, headers=headers) as response:
                return response.status

        assert await status("old-key-of-acme-0001") == 200
        assert await status("new-key-of-acme-0001") == 401
        digest = sha256(b"key-of-beta").hexdigest()
        secret.write(acme="new-key-of-acme-0001\n", **{"more.keys": f"beta:{digest}\n"})
        await same(lambda: status("new-key-of-acme-0001"), 200)
        assert await status("old-key-of-acme-0001") == 401
        assert await status("key-of-beta") == 200
        assert await made.router.metric("router_api_keys") == 2
        secret.write()
        await same(lambda: status("new-key-of-acme-0001"), 401)
        assert await status("key-of-beta") == 401
        assert await made.reason() == "there is no API key, so that nobody could ask"
        secret.write(acme="third-key-of-acme-01")
        await same(lambda: status("third-key-of-acme-01"), 200)
        assert await made.reason() == ""
