"""Health of the process, without an API server: what is not live, what is not ready, and why."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kubernetes.aio.client import ApiClient, Configuration

from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.shell import clock
from kvferry_operator.shell.api import ApiError
from kvferry_operator.shell.election import LeaseRecord
from kvferry_operator.shell.kinds import Kind
from kvferry_operator.shell.options import Options
from kvferry_operator.shell.process import BEAT_LATE_S, STUCK_S, UNREACHED_S, Operator
from kvferry_operator.shell.queue import Outcome
from kvferry_operator.shell.watch import SILENT_S
from kvferry_operator.shell.workers import PASS_S
from tests.operator.cluster import SETTINGS

OPTIONS = Options(
    settings=SETTINGS,
    lease_name="lease",
    lease_namespace="system",
    identity="me",
    port=0,
    host="127.0.0.1",
    namespaces=("ns",),
    log_level="info",
    log_json=True,
)


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(clock, "now", made)
    return made


@pytest.fixture
async def operator(time: Time, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operator]:
    """An operator whose watches are said to live; no part of it runs."""
    async with ApiClient(Configuration(host="http://127.0.0.1:9")) as client:
        made = Operator(OPTIONS, client)
        monkeypatch.setattr(made.watch, "alive", lambda: True)
        yield made


def list_all(operator: Operator) -> None:
    for stream in operator.watch.streams():
        operator._requested(stream, False, False)
        operator._requested(stream, True, False)


async def test_a_process_that_has_just_started_is_live_and_not_ready(operator: Operator) -> None:
    """It has not reached the API server yet."""
    assert operator.live() == ""
    assert operator.ready() == "the Lease cannot be reached"


async def test_ready_is_who_reaches_the_lease_and_has_seen_everything(operator: Operator, time: Time) -> None:
    """Also who waits: a rollout of the operator would else never end."""
    operator.keeper.reached_at = time.at
    assert operator.ready().startswith("not listed yet: ConfigMap, Deployment")
    list_all(operator)
    assert operator.ready() == ""
    operator._told_missing = "InferenceService"
    assert operator.ready() == "waits for the CRDs: InferenceService"
    operator._told_missing = ""
    time.at += UNREACHED_S + 1
    assert operator.ready() == "the Lease cannot be reached"


async def test_a_kind_whose_crd_is_not_installed_makes_nothing_unready_or_dead(operator: Operator, time: Time) -> None:
    """HTTPRoutes may be allowed where no Gateway API is."""
    operator.keeper.reached_at = time.at
    for stream in operator.watch.streams():
        if stream[0] != "HTTPRoute":
            operator._requested(stream, False, False)
            operator._requested(stream, True, False)
    assert operator.ready() == ""
    time.at += SILENT_S + 1
    operator.watch.beat_at = time.at
    for stream in operator.watch.streams():
        if stream[0] != "HTTPRoute":
            operator._requested(stream, True, False)
    assert operator.live() == ""


async def test_a_watch_that_neither_asks_nor_hears_is_not_live(operator: Operator, time: Time) -> None:
    """Its kind is named."""
    list_all(operator)
    time.at += SILENT_S + 1
    operator.watch.beat_at = time.at
    for stream in operator.watch.streams():
        if stream[0] != "Pod":
            operator._requested(stream, True, False)
    assert operator.live() == f"no word from the watch of Pod for more than {SILENT_S:.0f} s"


async def test_a_watch_thread_that_stands_still_is_not_live(operator: Operator, time: Time) -> None:
    """Its loop turns each second."""
    time.at += BEAT_LATE_S + 1
    assert "stood still for 31 s" in operator.live()


async def test_dead_watches_are_not_live(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends for that anyway; until it has, it does not pretend."""
    monkeypatch.setattr(operator.watch, "alive", lambda: False)
    assert operator.live() == ""
    operator._watch_over(RuntimeError("x"))
    assert operator.live() == "the watches have died"


async def test_a_stuck_worker_is_not_live(operator: Operator, time: Time) -> None:
    """A pass that its deadline did not end."""
    operator.workers.queue.add(("ns", "demo"), time.at)
    assert operator.workers.queue.take(time.at) == ("ns", "demo")
    time.at += PASS_S + STUCK_S + 1
    operator.watch.beat_at = time.at
    assert "beyond its deadline" in operator.live()
    operator.workers.queue.done(("ns", "demo"), time.at, Outcome())
    assert operator.live() == ""


async def test_work_begins_with_what_changed_lately(operator: Operator, time: Time) -> None:
    """Who led before may not have seen it; nothing is queued while another one leads. What was there when this process
    came is no change; what another list shows of it later is."""

    def show(name: str, version: int, *, listing: bool = False) -> None:
        metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version)}
        kind = {"apiVersion": "serving.kvferry.dev/v1alpha1", "kind": "InferenceService"}
        operator._seen({**kind, "metadata": metadata, "spec": {}}, listing)

    for number in range(8):
        show(f"old{number}", number + 1, listing=True)
    show("new", 100, listing=True)
    time.at += 10
    show("new", 101, listing=True)
    assert len(operator.workers.queue) == 0
    tasks = operator._begin()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(operator.workers.queue) == 9
    assert operator.workers.queue.take(time.at) == ("ns", "new")


async def test_the_fence_is_open_only_while_the_lease_is_held(operator: Operator, time: Time) -> None:
    """A write may last no longer than that."""
    assert operator._fence() == 0.0
    operator.election.written(LeaseRecord(holder=operator.election.identity, version="1"), time.at, time.at)
    assert operator._fence() == 10.0
    time.at += 9.0
    assert operator._fence() == 1.0
    time.at += 1.0
    assert operator._fence() == 0.0


class Shelf:
    """Answers looks: with objects, with nothing, or with an error."""

    def __init__(self) -> None:
        self.found: dict[str, Object] = {}
        self.error: ApiError | None = None
        self.looks: list[str] = []

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self.looks.append(name)
        if self.error is not None:
            raise self.error
        return self.found.get(name)


def config_map(name: str, version: int, **labels: str) -> Object:
    metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version), "labels": labels}
    owner = {"apiVersion": "serving.kvferry.dev/v1alpha1", "kind": "InferenceService", "name": "demo", "uid": "u"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "ownerReferences": [owner]}}


async def test_what_a_new_list_does_not_show_is_looked_up_until_the_server_answers(
    operator: Operator, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone, or without our label: no watch tells of either, and a server that is busy at that moment is asked again."""
    shelf = Shelf()
    monkeypatch.setattr(operator, "api", shelf)
    gone, bare = (("ConfigMap", "ns", name) for name in ("gone", "bare"))
    for number, ref in enumerate((gone, bare)):
        operator._seen(config_map(ref[2], number + 1, **{"app.kubernetes.io/instance": "demo"}), False)
    list_all(operator)
    list_all(operator)
    operator._working = True
    time.at += 60.0
    shelf.error = ApiError(429, "busy")
    shelf.found["bare"] = config_map("bare", 9)
    doubtful = operator._unshown()
    assert doubtful == {gone, bare}
    assert await operator._look_up(sorted(doubtful)) == set()
    assert len(shelf.looks) == 1  # the next one would fare no better
    assert (len(operator.cache), len(operator.workers.queue)) == (2, 0)
    shelf.error = None
    assert operator._unshown() == set()
    assert await operator._look_up(sorted(doubtful)) == doubtful
    assert operator.cache.get(gone) is None
    assert operator.cache.get(bare) == shelf.found["bare"]
    assert operator.workers.queue.take(time.at) == ("ns", "demo")


async def test_a_look_that_is_refused_is_not_repeated(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right that is missing is not there a second later: the next list is early enough."""
    shelf = Shelf()
    monkeypatch.setattr(operator, "api", shelf)
    shelf.error = ApiError(403, "no")
    refs = [("ConfigMap", "ns", "a"), ("ConfigMap", "ns", "b")]
    assert await operator._look_up(refs) == set(refs)
