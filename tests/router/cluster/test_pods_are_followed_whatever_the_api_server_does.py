"""Discovery over real HTTP before an API server that closes, forgets, refuses, stalls and goes."""

import asyncio
import logging
from pathlib import Path

import pytest

from kvferry_router.discovery.api_server import SERVICE_ACCOUNT, AccessError, in_cluster
from kvferry_router.discovery.slices import NOT_READY, TERMINATING

from .fake_api import TOKEN, FakeApi
from .following import following
from .objects import DECODE, PREFILL, make_endpoint, make_slice

pytestmark = pytest.mark.usefixtures("open_files")


async def make_api(folder: Path) -> FakeApi:
    """With one prefill and two decode pods."""
    api = FakeApi(folder)
    api.put(make_slice("p-1", make_endpoint("p1", "10.0.0.9"), service=PREFILL))
    api.put(make_slice("d-1", make_endpoint("d1", "10.0.0.1"), make_endpoint("d2", "10.0.0.2")))
    api.put(make_slice("x-1", make_endpoint("x1", "10.0.0.3"), service="other"))
    await api.start()
    return api


async def test_changes_are_told_within_a_second(tmp_path: Path) -> None:
    """Unready, leaving, gone, new: by events of one watch, of the two Services alone."""
    api = await make_api(tmp_path)
    async with following(api) as found:
        await found.until(lambda: found.pods() == {"p1": "", "d1": "", "d2": ""})
        assert found.discovery.why_unknown() == ""
        api.put(make_slice("d-1", make_endpoint("d1", "10.0.0.1", ready=False), make_endpoint("d2", "10.0.0.2")))
        assert await found.until(lambda: found.pods()["d1"] == NOT_READY) < 1.0
        leaving = make_endpoint("d2", "10.0.0.2", ready=False, serving=True, terminating=True)
        api.put(make_slice("d-1", make_endpoint("d1", "10.0.0.1"), leaving))
        assert await found.until(lambda: found.pods() == {"p1": "", "d1": "", "d2": TERMINATING}) < 1.0
        api.delete("p-1")
        api.put(make_slice("d-2", make_endpoint("d3", "10.0.0.4")))
        assert await found.until(lambda: found.pods() == {"d1": "", "d2": TERMINATING, "d3": ""}) < 1.0
        assert [told for _, told in api.of("list")] == ["200"]
        assert len(api.of("watch")) == 1
        selector = f"kubernetes.io/service-name in ({DECODE},{PREFILL})"
        assert {asked["labelSelector"] for asked in api.asked} == {selector}
        assert api.asked[1]["allowWatchBookmarks"] == "true"


async def test_nothing_is_told_twice(tmp_path: Path) -> None:
    """Bookmarks, and slices that change in what does not concern us, wake nobody."""
    api = await make_api(tmp_path)
    async with following(api) as found:
        await found.until(lambda: found.pods())
        made = make_slice("d-1", make_endpoint("d1", "10.0.0.1", nodeName="other"), make_endpoint("d2", "10.0.0.2"))
        api.put(made)
        api.put(make_slice("d-2", make_endpoint("d3", "10.0.0.4")))
        await found.until(lambda: "d3" in found.pods())
        assert len(found.told) == 2


async def test_a_watch_closed_each_moment_loses_no_event(tmp_path: Path) -> None:
    """It goes on from the version heard last: never a list, and no more than a few calls in a second."""
    api = await make_api(tmp_path)
    api.watch_s = 0.1
    async with following(api) as found:
        await found.until(lambda: found.pods())
        for number in range(3, 13):
            api.put(make_slice(f"d-{number}", make_endpoint(f"d{number}", f"10.0.1.{number}")))
            await found.until(lambda n=number: f"d{n}" in found.pods())
        await found.until(lambda: len(api.of("watch")) > 5)
        assert len(api.of("list")) == 1


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_forgotten_version_is_listed_anew(tmp_path: Path, in_stream: bool) -> None:
    """410 by status or by event: what happened meanwhile is not missed."""
    api = await make_api(tmp_path)
    async with following(api) as found:
        await found.until(lambda: found.pods())
        await api.stop()
        api.delete("p-1")
        api.forget(in_stream=in_stream)
        await api.start()
        await found.until(lambda: found.pods() == {"d1": "", "d2": ""})
        assert len(api.of("list")) == 2
        assert found.failures("gone") == 1


@pytest.mark.parametrize("status", [500, 503, 429, 404, 410])
async def test_refusals_are_tried_again(tmp_path: Path, status: int) -> None:
    """Of lists and of watches, with growing pauses."""
    api = await make_api(tmp_path)
    api.answers.extend([status] * 3)
    async with following(api) as found:
        await found.until(lambda: found.pods())
        assert found.failures({429: "throttled", 410: "gone"}.get(status, "status")) == 3
        api.answers.extend([status] * 3)
        await api.stop()
        api.delete("p-1")
        await api.start()
        await found.until(lambda: found.pods() == {"d1": "", "d2": ""})
        assert len(api.of("list")) == (4 if status != 410 else 7)


async def test_retry_after_is_kept(tmp_path: Path) -> None:
    """The API server says when."""
    api = await make_api(tmp_path)
    api.answers.append(429)
    api.retry_after = "1"
    async with following(api) as found:
        await found.until(lambda: found.pods())
        first, second = (at for at, _ in api.of("list"))
        assert second - first >= 1.0


async def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    """401 until the kubelet has brought the new one; no restart, no token in any log."""
    api = await make_api(tmp_path)
    api.watch_s = 0.1
    async with following(api) as found:
        await found.until(lambda: found.pods())
        api.rotate("second-token", write=False)
        await found.until(lambda: found.failures("unauthorized") >= 2)
        api.rotate("second-token")
        api.delete("p-1")
        await found.until(lambda: found.pods() == {"d1": "", "d2": ""})


async def test_failures_are_logged_without_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once per kind, with what the API server says."""
    api = await make_api(tmp_path)
    api.tokens = {"another"}
    with caplog.at_level(logging.INFO):
        async with following(api) as found:
            await found.until(lambda: found.failures("unauthorized") >= 3)
            assert found.discovery.why_unknown() == "the API server has not told of any pods yet (unauthorized)"
            assert not found.told
    told = [record for record in caplog.records if "cannot be asked" in record.getMessage()]
    assert len(told) == 1
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("content", ["", "two\nlines", "caf\u00e9"])
async def test_a_token_that_is_none_is_no_request(tmp_path: Path, content: str) -> None:
    """A header of the kubelet's making is not put together from rubbish."""
    api = await make_api(tmp_path)
    (tmp_path / "token").write_text(content)
    async with following(api) as found:
        await found.until(lambda: found.failures("credentials") >= 2)
        assert api.calls == []
        api.rotate(TOKEN)
        await found.until(lambda: found.pods())


async def test_a_silent_watch_is_opened_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A connection that tells nothing, bookmarks included, is not believed for ever; nor is it an outage."""
    api = await make_api(tmp_path)
    with caplog.at_level(logging.INFO):
        async with following(api) as found:
            await found.until(lambda: found.pods())
            api.mute = True
            api.delete("p-1")
            await found.until(lambda: found.failures("silent") >= 2)
            assert found.discovery.current()
            api.mute = False
            await found.until(lambda: found.pods() == {"d1": "", "d2": ""})
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_slow_api_server_is_waited_for_up_to_a_deadline(tmp_path: Path) -> None:
    """A list that takes its time is taken; one that takes too long is asked for again."""
    api = await make_api(tmp_path)
    api.slow_s = 0.2
    async with following(api) as found:
        await found.until(lambda: found.pods())
        assert found.failures("timeout") == 0
    api = await make_api(tmp_path)
    api.slow_s = 5.0
    async with following(api) as found:
        await found.until(lambda: found.failures("timeout") >= 1)
        api.slow_s = 0.0
        await found.until(lambda: found.pods())


async def test_while_the_api_server_is_away_the_pods_known_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod that was unready then may be asked itself; one that was leaving stays out. Log and metric tell it."""
    api = await make_api(tmp_path)
    leaving = make_endpoint("d2", "10.0.0.2", ready=False, terminating=True)
    api.put(make_slice("d-1", make_endpoint("d1", "10.0.0.1", ready=False), leaving))
    with caplog.at_level(logging.INFO):
        async with following(api) as found:
            await found.until(lambda: found.pods() == {"p1": "", "d1": NOT_READY, "d2": TERMINATING})
            assert found.discovery.current()
            await api.stop()
            await found.until(lambda: not found.discovery.current())
            assert found.pods() == {"p1": "", "d1": "", "d2": TERMINATING}
            assert found.discovery.why_unknown() == ""
            silence = found.metrics.registry.get_sample_value("kvferry:router_discovery_silence_seconds")
            assert silence is not None
            assert silence >= 0.4
            await api.start()
            await found.until(lambda: found.pods()["d1"] == NOT_READY)
            assert found.discovery.current()
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("the API server is away: the pods known stay") == 1
    assert messages.count("the API server is back") == 1


async def test_an_api_server_that_is_away_at_first_is_found_later(tmp_path: Path) -> None:
    """Nothing is told until then, and why is."""
    api = await make_api(tmp_path)
    await api.stop()
    async with following(api) as found:
        await found.until(lambda: found.failures("connection") >= 2)
        assert "has not told of any pods yet (connection)" in found.discovery.why_unknown()
        await api.start()
        await found.until(lambda: found.pods())


async def test_an_unreadable_event_leads_to_a_list(tmp_path: Path) -> None:
    """What it said is lost, so what is there now is asked for."""
    api = await make_api(tmp_path)
    async with following(api) as found:
        await found.until(lambda: found.pods())
        api.send("RENAMED", {})
        await found.until(lambda: len(api.of("list")) == 2)
        api.delete("p-1")
        await found.until(lambda: found.pods() == {"d1": "", "d2": ""})


@pytest.mark.parametrize("body", [b"<html>gateway</html>", b'{"items": []}', b""])
async def test_an_unreadable_list_is_asked_for_again(tmp_path: Path, body: bytes) -> None:
    """Something between us and the API server may answer in its place; it never empties the pools."""
    api = await make_api(tmp_path)
    api.answers.append(body)
    async with following(api) as found:
        await found.until(lambda: found.pods())
        assert found.failures("protocol") == 1
        assert len(found.told) == 1


async def test_answers_are_bounded(tmp_path: Path) -> None:
    """A list or an event that never ends is not read to its end."""
    api = await make_api(tmp_path)
    async with following(api, api_list_bytes=500) as found:
        await found.until(lambda: found.failures("protocol") >= 2)
    api = await make_api(tmp_path)
    async with following(api, api_event_bytes=5000) as found:
        await found.until(lambda: found.pods())
        api.send("MODIFIED", make_slice("d-1") | {"junk": "x" * 6000})
        await found.until(lambda: found.failures("protocol") >= 1)
        api.delete("p-1")
        await found.until(lambda: found.pods() == {"d1": "", "d2": ""})


async def test_redirects_are_not_followed(tmp_path: Path) -> None:
    """The token goes to the API server alone."""
    api = await make_api(tmp_path)
    api.answers.append(307)
    async with following(api) as found:
        await found.until(lambda: found.pods())
        assert found.failures("status") == 1


def test_outside_of_a_cluster_it_says_what_is_missing(tmp_path: Path) -> None:
    """All of it at once."""
    with pytest.raises(AccessError) as caught:
        in_cluster(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    for part in ("KUBERNETES_SERVICE_PORT", "token: no such file", "ca.crt: no such file"):
        assert part in str(caught.value)
    assert str(SERVICE_ACCOUNT) == "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.parametrize(
    ("host", "url"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_the_api_server_is_where_the_kubelet_says(tmp_path: Path, host: str, url: str) -> None:
    """Of both families; always by TLS."""
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
    assert in_cluster(tmp_path, env).url == url


async def test_cancelling_leaves_nothing(tmp_path: Path) -> None:
    """In a list, in a watch and in a pause; ``open_files`` looks at the sockets."""
    for prepare in ("list", "watch", "pause"):
        api = await make_api(tmp_path)
        if prepare == "list":
            api.slow_s = 5.0
        elif prepare == "pause":
            await api.stop()
        async with following(api) as found:
            await found.until(lambda a=api, p=prepare, f=found: _under_way(a, p, f))
        await asyncio.sleep(0)


def _under_way(api: FakeApi, what: str, found: object) -> bool:
    if what == "watch":
        return api.watches == 1
    if what == "list":
        return len(api.asked) == 1
    return found.failures("connection") >= 1  # type: ignore[attr-defined]
