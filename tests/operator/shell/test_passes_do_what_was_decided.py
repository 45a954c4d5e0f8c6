"""A pass: looks before it takes a name, goes on after a refusal, stops at an outage, tells what is."""

import copy
from typing import Any

import pytest

from kvferry_operator.shell.api import ApiError, FencedError
from kvferry_operator.shell.queue import Outcome
from kvferry_operator.shell.reconcile import ABSENT_S, INTERNAL, KEYS_AGAIN_S
from tests.operator.cluster import make_found
from tests.operator.fake_cluster import FakeCluster
from tests.operator.shell.fake_api import Rig

KEY = ("ns", "demo")


def make_rig(**changes: Any) -> Rig:
    return Rig(FakeCluster(make_found(**changes)))


async def settle(rig: Rig, rounds: int = 40) -> None:
    """Passes and controllers in turn until a pass asks for nothing."""
    for _ in range(rounds):
        rig.watch()
        rig.api.calls.clear()
        await rig.reconciler.run(KEY)
        rig.cluster.run()
        if not rig.api.calls:
            return
    raise AssertionError(rig.api.calls)


def reason(rig: Rig, kind: str = "Ready") -> tuple[str, str]:
    conditions = rig.cluster.found.get("status", {}).get("conditions", ())
    return next(((one["status"], one["reason"]) for one in conditions if one["type"] == kind), ("", ""))


async def test_a_service_becomes_ready_and_then_nothing_is_asked() -> None:
    """The last pass makes no call at all."""
    rig = make_rig()
    await settle(rig)
    assert reason(rig) == ("True", "Answering")


async def test_a_name_is_looked_up_before_it_is_taken() -> None:
    """No watch shows an object without our label: each object is read once before its first write, the Secret never."""
    rig = make_rig()
    rig.watch()
    await rig.reconciler.run(KEY)
    looks = [(kind, name) for verb, kind, name in rig.api.calls if verb == "get"]
    first = [(kind, name) for verb, kind, name in rig.api.calls if verb in ("apply", "create")]
    assert len(looks) == len(set(looks))
    assert set(first) - {one for one in first if one[0] == "Secret"} == set(looks)
    assert not [one for one in looks if one[0] == "Secret"]
    verbs = [verb for verb, _, _ in rig.api.calls]
    assert verbs.index("create") > max(index for index, verb in enumerate(verbs[: len(looks)]) if verb == "get")


async def test_a_name_of_somebody_else_is_told_and_looked_at_again() -> None:
    """Nothing is written; the pass counts as failed, since no watch tells when the name gets free."""
    rig = make_rig()
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo-plan"}, "data": {}}
    rig.cluster.objects["ConfigMap", "demo-plan"] = theirs
    rig.cache.put(rig.api._answer(rig.cluster.found))
    outcome = await rig.reconciler.run(KEY)
    assert outcome.failed
    assert reason(rig) == ("False", "NameTaken")
    assert set(rig.cluster.objects) == {("ConfigMap", "demo-plan")}
    del rig.cluster.objects["ConfigMap", "demo-plan"]
    await settle(rig)
    assert reason(rig) == ("True", "Answering")


async def test_a_refusal_stops_no_other_effect_and_is_told_in_the_same_pass() -> None:
    """403 of one kind: everything else is there, and the status says why it is not Ready."""
    rig = make_rig()
    told = 'deployments.apps is forbidden: User "x" cannot patch'
    rig.api.refuse = lambda verb, kind, name: ApiError(403, told) if (verb, kind) == ("apply", "Deployment") else None
    rig.watch()
    outcome = await rig.reconciler.run(KEY)
    assert outcome == Outcome(failed=True, progressed=True, wrote=True)
    assert reason(rig) == ("False", "RBACRefused")
    kinds = {kind for kind, _ in rig.cluster.objects}
    assert {"Service", "NetworkPolicy", "PodDisruptionBudget", "Secret", "InferenceServiceRole"} <= kinds
    assert "Deployment" not in kinds
    rig.api.refuse = lambda verb, kind, name: None
    await settle(rig)
    assert reason(rig) == ("True", "Answering")


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [
        (ApiError(0, "refused", away=True), 1.0),
        (ApiError(429, "busy", retry_after_s=7.0), 7.0),
        (ApiError(429, "busy"), 1.0),
        (ApiError(500, "sick"), 0.0),
        (ApiError(0, "no answer within 10 s"), 0.0),
    ],
)
async def test_an_outage_ends_the_pass_and_says_how_long_to_pause(error: ApiError, pause_s: float) -> None:
    """What would fare no better is not tried; a hook that hangs concerns its own service alone."""
    rig = make_rig()
    rig.api.refuse = lambda verb, kind, name: error if verb in ("apply", "create") else None
    rig.watch()
    outcome = await rig.reconciler.run(KEY)
    assert (outcome.failed, outcome.pause_s) == (True, pause_s)
    assert [verb for verb, _, _ in rig.api.calls if verb in ("apply", "create")] == ["create"]


async def test_looks_are_spared_while_the_server_is_too_busy() -> None:
    """A pass after a pause asks only for what it writes; some seconds later names are looked up again."""
    rig = make_rig()
    rig.api.refuse = lambda verb, kind, name: ApiError(429, "busy") if verb != "get" else None
    counts = []
    for seconds in (0.0, 2.0, 2.0, ABSENT_S):
        rig.now += seconds
        rig.api.calls.clear()
        rig.watch()
        await rig.reconciler.run(KEY)
        counts.append(sum(verb == "get" for verb, _, _ in rig.api.calls))
    assert counts[1:3] == [0, 0]
    assert counts[0] == counts[3] > 10


def words(rig: Rig) -> list[dict[str, Any]]:
    """The conditions without their times."""
    return [{**one, "lastTransitionTime": ""} for one in rig.cluster.found["status"]["conditions"]]


CONFLICT = ApiError(409, "the object has been modified", reason="Conflict")


async def test_a_conflict_is_tried_again_and_told_to_nobody() -> None:
    """Somebody wrote at the same moment: no person needs to know."""
    rig = make_rig()
    await settle(rig)
    rig.cluster.objects["ConfigMap", "demo-plan"]["data"]["revision"] = "lies"
    rig.api.refuse = lambda verb, kind, name: CONFLICT if verb == "apply" else None
    rig.watch()
    outcome = await rig.reconciler.run(KEY)
    assert outcome.failed
    assert reason(rig, "Progressing") == ("True", "Complete")
    rig.api.refuse = lambda verb, kind, name: None
    await settle(rig)


@pytest.mark.parametrize("verb", ["create", "apply", "merge", "delete", "apply status"])
async def test_a_conflict_of_any_call_costs_another_pass_and_nothing_else(verb: str) -> None:
    """Only that an object of its name exists is an answer to a creation; all else may not have been done. A quota that
    was counted at the same moment, for one, refuses a new object with 409."""
    rig, plain = make_rig(spec__decode__replicas=2), make_rig(spec__decode__replicas=2)
    left = 3

    def refuse(called: str, kind: str, name: str) -> ApiError | None:
        nonlocal left
        if called != verb or kind == "Event" or not left:
            return None
        left -= 1
        return CONFLICT

    async def edited(one: Rig) -> None:
        await settle(one)
        changed = make_found(spec__decode__replicas=1, spec__prefill=..., spec__router__port=8123)
        one.cluster.found["spec"] = changed["spec"]
        one.cluster.found["metadata"]["generation"] += 1
        await settle(one)

    rig.api.refuse = refuse
    failed = []
    run = rig.reconciler.run

    async def seen(key: tuple[str, str]) -> Outcome:
        before, outcome = left, await run(key)
        failed.append((before != left, outcome.failed))
        return outcome

    rig.reconciler.run = seen  # type: ignore[method-assign]
    await edited(rig)
    await edited(plain)
    assert left == 0
    assert all(told for hit, told in failed if hit)
    assert set(rig.cluster.objects) == set(plain.cluster.objects)
    assert words(rig) == words(plain)


async def test_an_answer_that_got_lost_changes_nothing_in_the_end() -> None:
    """Done, but not answered: the next pass finds it."""
    rig, plain = make_rig(), make_rig()
    rig.api.done_first = True
    number = 0

    def refuse(verb: str, kind: str, name: str) -> ApiError | None:
        nonlocal number
        number += 1
        return ApiError(0, "lost") if verb != "get" and "status" not in verb and number % 4 == 0 else None

    rig.api.refuse = refuse
    for _ in range(40):
        rig.watch()
        await rig.reconciler.run(KEY)
        rig.cluster.run()
    rig.api.refuse = lambda verb, kind, name: None
    await settle(rig)
    await settle(plain)
    assert set(rig.cluster.objects) == set(plain.cluster.objects)
    assert not rig.cluster.deleted_pods


async def attempts(rig: Rig) -> int:
    """How often a pass over everything as it is now tries to make the Secret."""
    rig.api.calls.clear()
    rig.watch()
    await rig.reconciler.run(KEY)
    return sum((verb, kind) == ("create", "Secret") for verb, kind, _ in rig.api.calls)


def let_wait(pod: dict[str, Any], *, init: bool) -> None:
    """As the kubelet tells of a pod whose volumes are not there; with init containers it has another word for it."""
    waiting = {"waiting": {"reason": "PodInitializing" if init else "ContainerCreating"}}
    status = pod["status"]
    status["containerStatuses"] = [{**status["containerStatuses"][0], "state": waiting, "ready": False}]
    status["initContainerStatuses"] = [{"name": "fetch-model", "state": waiting}] if init else []


@pytest.mark.parametrize("init", [False, True], ids=["no init container", "one that fetches"])
async def test_the_secret_is_made_once_and_again_where_pods_wait_for_it(init: bool) -> None:
    """It cannot be read: it is made at first sight, and again when a pod has waited for its volumes for a while."""
    rig = make_rig()
    await settle(rig)
    assert await attempts(rig) == 0
    (name,) = [name for kind, name in rig.cluster.objects if kind == "Secret"]
    del rig.cluster.objects["Secret", name]
    let_wait(next(iter(rig.cluster.pods.values())), init=init)
    assert await attempts(rig) == 0
    rig.now += KEYS_AGAIN_S
    assert await attempts(rig) == 1
    assert ("Secret", name) in rig.cluster.objects
    assert await attempts(rig) == 0


async def test_keys_made_anew_are_told_with_the_pods_that_have_the_former() -> None:
    """They run, and are ready by themselves: nothing else would say why they no longer work with new ones."""
    rig = make_rig()
    await settle(rig)
    await rig.recorder.flush()
    assert "KeysReplaced" not in {event["reason"] for event in rig.api.events}
    (name,) = [name for kind, name in rig.cluster.objects if kind == "Secret"]
    waits, *run = rig.cluster.pods.values()
    let_wait(waits, init=True)
    waits["status"]["conditions"] = []
    rig.now += KEYS_AGAIN_S
    assert await attempts(rig) == 1  # it is there: pods wait for something else
    await rig.recorder.flush()
    assert "KeysReplaced" not in {event["reason"] for event in rig.api.events}
    del rig.cluster.objects["Secret", name]
    rig.now += KEYS_AGAIN_S
    assert await attempts(rig) == 1
    await rig.recorder.flush()
    (event,) = [event for event in rig.api.events if event["reason"] == "KeysReplaced"]
    assert event["type"] == "Warning"
    assert all(pod["metadata"]["name"] in event["note"] for pod in run)
    assert waits["metadata"]["name"] not in event["note"]


async def test_a_successor_asks_for_the_secret_only_where_a_pod_waits() -> None:
    """It was made before any Deployment was: a new leader need not try for each of its services."""
    rig = make_rig()
    await settle(rig)
    successor = Rig(rig.cluster)
    assert await attempts(successor) == 0
    assert not successor.api.calls
    (name,) = [name for kind, name in rig.cluster.objects if kind == "Secret"]
    del rig.cluster.objects["Secret", name]
    let_wait(next(iter(rig.cluster.pods.values())), init=True)
    assert await attempts(successor) == 1
    assert ("Secret", name) in rig.cluster.objects


async def test_a_secret_that_was_refused_is_tried_again_and_told_of_until_it_is_there() -> None:
    """Though everything else is made meanwhile."""
    rig = make_rig()
    rig.api.refuse = lambda verb, kind, name: ApiError(403, "exceeded quota") if kind == "Secret" else None
    for _ in range(3):
        assert await attempts(rig) == 1
        assert reason(rig, "Progressing") == ("False", "QuotaExceeded")
    rig.api.refuse = lambda verb, kind, name: None
    assert await attempts(rig) == 1
    rig.cluster.run()
    await settle(rig)
    assert reason(rig) == ("True", "Answering")


async def test_another_service_of_the_same_name_gets_keys_of_its_own() -> None:
    """Deleted and made anew: what was known of the former is forgotten."""
    rig = make_rig()
    await settle(rig)
    former = {name for kind, name in rig.cluster.objects if kind == "Secret"}
    rig.cluster.objects.clear()
    rig.cluster.pods.clear()
    rig.cluster.found = make_found(uid="99999999-0000-0000-0000-000000000000")
    await settle(rig)
    now = {name for kind, name in rig.cluster.objects if kind == "Secret"}
    assert len(former) == len(now) == 1
    assert former != now


async def test_a_service_that_goes_is_left_to_the_garbage_collector() -> None:
    """No call while it is being deleted; nothing is remembered once it is gone."""
    rig = make_rig()
    await settle(rig)
    rig.cluster.found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    rig.cluster.objects.pop(("ConfigMap", "demo-plan"))
    rig.watch()
    rig.api.calls.clear()
    assert await rig.reconciler.run(KEY) == Outcome()
    rig.cache.forget(("InferenceService", *KEY))
    assert await rig.reconciler.run(KEY) == Outcome(gone=True)
    assert not rig.api.calls
    assert not rig.reconciler._memory


async def test_a_failure_of_ours_is_told_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One service that the decision fails on: Ready is False with words, what runs stays, the worker lives."""
    rig = make_rig()
    await settle(rig)
    before = copy.deepcopy(rig.cluster.objects)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvferry_operator.shell.reconcile.decide", broken)
    rig.watch()
    await rig.reconciler.run(KEY)
    assert reason(rig) == ("False", INTERNAL)
    assert set(rig.cluster.objects) == set(before)


async def test_a_status_of_an_object_that_is_gone_is_no_failure() -> None:
    """Its own events will tell."""
    rig = make_rig()
    rig.api.refuse = lambda verb, kind, name: ApiError(404, "gone") if "status" in verb else None
    rig.watch()
    assert not (await rig.reconciler.run(KEY)).failed


async def test_a_status_that_could_not_be_written_is_tried_again() -> None:
    """And its Events are told only once it is."""
    rig = make_rig()
    rig.api.refuse = lambda verb, kind, name: ApiError(500, "sick") if "status" in verb else None
    rig.watch()
    assert (await rig.reconciler.run(KEY)).failed
    await rig.recorder.flush()
    assert rig.api.events == []
    rig.api.refuse = lambda verb, kind, name: None
    rig.watch()
    assert not (await rig.reconciler.run(KEY)).failed
    await rig.recorder.flush()
    assert [event["regarding"]["name"] for event in rig.api.events] == ["demo"] * len(rig.api.events) != []


async def test_a_closed_fence_goes_up() -> None:
    """It is no failure of a service: the process must end."""
    rig = make_rig()

    def refuse(verb: str, kind: str, name: str) -> ApiError | None:
        if verb != "get":
            raise FencedError
        return None

    rig.api.refuse = refuse
    rig.watch()
    with pytest.raises(FencedError):
        await rig.reconciler.run(KEY)


async def test_an_event_that_cannot_be_written_delays_nothing() -> None:
    """It is dropped and counted."""
    rig = make_rig()
    dropped: list[int] = []
    rig.recorder._dropped = lambda: dropped.append(1)
    rig.api.refuse = lambda verb, kind, name: ApiError(403, "no") if kind == "Event" else None
    rig.watch()
    outcome = await rig.reconciler.run(KEY)
    await rig.recorder.flush()
    assert not outcome.failed
    assert dropped
    assert rig.api.events == []
