"""``/readyz/router`` says whether clients should be sent to a router, ``/readyz`` whether they would get tokens."""

from pathlib import Path

import pytest

from tests.router.cluster.test_a_router_in_a_cluster_sends_only_where_it_may import Cluster, cluster, same
from tests.router.scripted_pod import ScriptedPod


async def traffic(made: Cluster) -> int:
    async with made.router.session.get(made.router.url + "/readyz/router") as response:
        return response.status


async def answer(made: Cluster) -> tuple[int, bool]:
    async with made.router.complete("hello") as response:
        return response.status, "Retry-After" in response.headers


async def test_without_any_pod_it_is_there_to_say_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is scaled to zero answers, and says when to come again."""
    async with cluster(tmp_path, monkeypatch) as made:
        await same(lambda: traffic(made), 200)
        assert "no pods are known" in await made.reason()
        assert await answer(made) == (503, True)


async def test_it_takes_none_before_a_pod_that_is_there_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new router beside one that works would only answer worse."""
    d1 = ScriptedPod("d1", "decode")
    d1.ready = False
    async with cluster(tmp_path, monkeypatch, d1, wait=False) as made:
        await same(made.reason, "no decode pod can be used: d1: loading")
        assert await traffic(made) == 503
        d1.ready = True
        await same(lambda: traffic(made), 200)
        assert await made.reason() == ""


async def test_it_stays_when_its_pods_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All routers of the service lose them alike; clients are told so rather than refused."""
    d1 = ScriptedPod("d1", "decode")
    async with cluster(tmp_path, monkeypatch, d1) as made:
        assert await traffic(made) == 200
        d1.ready = False
        await made.router.wait_pods(0)
        assert await traffic(made) == 200
        assert await answer(made) == (503, True)
