"""Over all requests: how many answers are resumed in a while, and which requests are tried no more."""

from pathlib import Path

import msgspec

from kvferry_router.resumes import ResumeBudget, Suspects
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.leg import Leg
from kvferry_wire.limits import Limits

from .builders import make_leg
from .harness import LIMITS, running
from .scripted_pod import Script, ScriptedPod
from .test_lost_streams_go_on_elsewhere import PROMPT, check_stream, streamed


def test_resumes_fill_up_with_time() -> None:
    """A burst, then so many a second, never more than the burst."""
    budget = ResumeBudget(Limits(resumes_per_s=2.0, resume_burst=3))
    assert [budget.take(10.0) for _ in range(5)] == [True, True, True, False, False]
    assert [budget.take(10.5) for _ in range(2)] == [True, False]
    assert [budget.take(1000.0) for _ in range(4)] == [True, True, True, False]


def make_request(prompt: tuple[int, ...] = (1, 2, 3), salt: bytes = b"") -> Leg:
    return msgspec.structs.replace(make_leg(prompt=prompt), extras=KeyExtras(tenant_salt=salt))


def test_a_suspect_is_known_by_tenant_and_prompt_for_a_while() -> None:
    """Another tenant's, or another prompt, is another request."""
    suspects = Suspects(Limits(suspect_s=60.0))
    suspects.add(make_request(), 5.0)
    assert suspects.holds(make_request(), 64.9)
    assert not suspects.holds(make_request((1, 2, 4)), 64.9)
    assert not suspects.holds(make_request(salt=b"t"), 64.9)
    assert not suspects.holds(make_request(), 65.0)
    assert len(suspects) == 0


def test_suspects_are_bounded() -> None:
    """The oldest is forgotten first; one that is added again is the newest."""
    suspects = Suspects(Limits(suspects=2))
    for number in (1, 2, 1, 3):
        suspects.add(make_request((number,)), 0.0)
    assert [suspects.holds(make_request((number,)), 1.0) for number in (1, 2, 3)] == [True, False, True]


async def test_a_request_that_ended_its_pods_is_refused_when_it_comes_again(tmp_path: Path) -> None:
    """Clients repeat what failed with a 5xx: the second time costs no pod."""
    pods = [ScriptedPod(f"d{number}", "decode") for number in range(4)]
    for pod in pods:
        pod.default["decode"] = Script(fault="cut")
    async with running(tmp_path, *pods) as router:
        for _ in range(3):
            async with router.complete(PROMPT) as response:
                assert (await response.json())["error"]["code"] == "engine_lost_repeatedly"
        assert sum(len(pod.legs) for pod in pods) == 3
        assert await router.metric("router_requests_total", outcome="failed") == 3
        for pod in pods:
            pod.default["decode"] = Script()
        async with router.complete("something else") as response:
            assert response.status == 200


async def test_resumes_beyond_the_burst_wait_and_are_not_lost(tmp_path: Path) -> None:
    """One resume in the bucket and twenty a second: five deaths in one answer take that much longer."""
    d = ScriptedPod("d1", "decode")
    d.default["decode"] = Script(fault="cut", after=12)
    limits = msgspec.structs.replace(LIMITS, resumes_per_s=20.0, resume_burst=1, resume_wait_s=3.0)
    async with running(tmp_path, d, limits=limits) as router:
        async with streamed(router) as response:
            body = await response.read()
        check_stream(body, cause=", ".join(["dead"] * (len(d.legs) - 1)))
