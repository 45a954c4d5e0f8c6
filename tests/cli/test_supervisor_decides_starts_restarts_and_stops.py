"""The launcher's decision core: its table, its order, its delays."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_cli.local.supervisor import (
    RUNNING,
    TRANSITIONS,
    AllReady,
    AllStopped,
    Changed,
    Effect,
    GaveUp,
    IllegalTransitionError,
    Kill,
    PodSeat,
    PodState,
    Policy,
    Spawn,
    Supervisor,
    Terminate,
    Trigger,
    backoff,
)

SEATS = (
    PodSeat(name="prefill-0", role="prefill"),
    PodSeat(name="decode-0", role="decode"),
    PodSeat(name="decode-1", role="decode"),
    PodSeat(name="router", role="router"),
)
POLICY = Policy(grace_s=10.0, stable_s=30.0, start_s=100.0, hung_s=20.0, hung_probes=4, silent_probes=2, late_probes=2)


def make_supervisor(**changes: object) -> Supervisor:
    fields = {name: getattr(POLICY, name) for name in POLICY.__struct_fields__} | changes
    return Supervisor(SEATS, Policy(**fields))  # type: ignore[arg-type]  # a table of test values


def ready(supervisor: Supervisor, name: str, now: float, attempt: int = 1) -> list[Effect]:
    return supervisor.probed(name, attempt, ready=True, live=True, reason="", now=now)


def bad(supervisor: Supervisor, name: str, now: float, *, live: bool = True, attempt: int = 1) -> list[Effect]:
    return supervisor.probed(name, attempt, ready=False, live=live, reason="warming up", now=now)


def of_kind(effects: list[Effect], kind: type) -> list[str]:
    return [effect.name for effect in effects if isinstance(effect, kind)]  # type: ignore[union-attr]  # kinds with names


def all_ready(supervisor: Supervisor, now: float = 1.0) -> None:
    supervisor.start(0.0)
    for seat in SEATS:
        ready(supervisor, seat.name, now)


def test_engines_start_at_once_and_the_router_when_a_decode_pod_is_ready() -> None:
    """The router has nobody to send requests to before that."""
    supervisor = make_supervisor()
    assert of_kind(supervisor.start(0.0), Spawn) == ["prefill-0", "decode-0", "decode-1"]
    assert of_kind(ready(supervisor, "prefill-0", 1.0), Spawn) == []
    assert of_kind(ready(supervisor, "decode-1", 2.0), Spawn) == ["router"]
    assert of_kind(ready(supervisor, "decode-0", 3.0), Spawn) == []
    assert AllReady() in ready(supervisor, "router", 4.0)
    assert supervisor.service_state() == "ready"


def test_all_ready_is_told_again_after_a_pod_came_back() -> None:
    """The event marks each time that the service becomes whole."""
    supervisor = make_supervisor()
    all_ready(supervisor)
    assert AllReady() not in ready(supervisor, "router", 2.0)
    bad(supervisor, "router", 3.0)
    assert supervisor.service_state() == "degraded"
    assert AllReady() in ready(supervisor, "router", 4.0)


def test_a_pod_that_exits_starts_again_after_a_growing_delay() -> None:
    """Delays double from the first to the cap."""
    supervisor = make_supervisor(start_s=1e6)
    supervisor.start(0.0)
    now, delays = 0.0, []
    for attempt in range(1, 10):
        changed = [e for e in supervisor.exited("decode-0", attempt, "exit status 1", now) if isinstance(e, Changed)]
        delays.append(changed[0].retry_s)
        assert supervisor.tick(now + delays[-1] - 0.01) == []
        now += delays[-1]
        assert supervisor.tick(now) == [
            Changed(name="decode-0", before=PodState.BACKOFF, state=PodState.STARTING, reason=""),
            Spawn("decode-0", attempt + 1),
        ]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_the_delay_starts_over_after_a_stable_time() -> None:
    """A pod that was ready for long is not punished for what happened before."""
    supervisor = make_supervisor()
    supervisor.start(0.0)
    supervisor.exited("decode-0", 1, "exit status 1", 0.0)
    supervisor.tick(0.5)
    ready(supervisor, "decode-0", 1.0, attempt=2)
    effects = supervisor.exited("decode-0", 2, "exit status 1", 31.0)
    assert [e.retry_s for e in effects if isinstance(e, Changed)] == [0.5]
    supervisor.tick(31.5)
    ready(supervisor, "decode-0", 32.0, attempt=3)
    effects = supervisor.exited("decode-0", 3, "exit status 1", 61.0)
    assert [e.retry_s for e in effects if isinstance(e, Changed)] == [1.0]


def test_a_probe_of_an_earlier_process_says_nothing() -> None:
    """A late answer must not make a dead pod ready."""
    supervisor = make_supervisor()
    supervisor.start(0.0)
    supervisor.exited("decode-0", 1, "exit status 1", 1.0)
    assert ready(supervisor, "decode-0", 1.1) == []
    supervisor.tick(1.5)
    assert ready(supervisor, "decode-0", 1.6, attempt=1) == []
    assert of_kind(ready(supervisor, "decode-0", 1.7, attempt=2), Changed) == ["decode-0", "router"]


def test_one_lost_probe_is_no_news_but_a_refusal_is() -> None:
    """Silence counts when it lasts for two probes in a row, an answer that says "not ready" at once."""
    supervisor = make_supervisor()
    all_ready(supervisor, 1.0)
    assert bad(supervisor, "decode-0", 5.9, live=False) == []
    assert ready(supervisor, "decode-0", 6.0) == []
    assert bad(supervisor, "decode-0", 7.0, live=False) == []
    assert of_kind(bad(supervisor, "decode-0", 8.0, live=False), Changed) == ["decode-0"]
    assert of_kind(bad(supervisor, "decode-1", 2.0, live=True), Changed) == ["decode-1"]


def test_a_process_that_hangs_is_killed_once_after_several_probes_without_an_answer() -> None:
    """Both the count and the duration are needed; what was done to it is in the reason of its exit."""
    supervisor = make_supervisor()
    supervisor.start(0.0)
    ready(supervisor, "decode-0", 1.0)
    for now in (10.0, 11.0, 12.0, 13.0, 29.0):
        assert of_kind(bad(supervisor, "decode-0", now, live=False), Kill) == []
    assert bad(supervisor, "decode-0", 30.0, live=False) == [Kill("decode-0", "answered no probe for 20 s")]
    assert bad(supervisor, "decode-0", 31.0, live=False) == []
    supervisor.exited("decode-0", 1, "killed by SIGKILL", 31.0)
    view = {pod.name: pod for pod in supervisor.view()}
    assert view["decode-0"].reason == "answered no probe for 20 s; killed by SIGKILL"


def test_a_process_that_never_gets_ready_is_killed_once() -> None:
    """After its time to start, by probes that say so."""
    supervisor = make_supervisor()
    supervisor.start(0.0)
    assert bad(supervisor, "decode-0", 99.0) == []
    assert bad(supervisor, "decode-0", 100.0) == []
    assert bad(supervisor, "decode-0", 101.0) == [Kill("decode-0", "not ready within 100 s")]
    assert bad(supervisor, "decode-0", 102.0) == []


@pytest.mark.parametrize("pause", [4.0, 35.0, 5000.0])
def test_a_launcher_that_was_paused_kills_nothing_and_calls_nothing_unready(pause: float) -> None:
    """The one probe that a pause broke is no evidence, whatever the clock says."""
    supervisor = make_supervisor()
    supervisor.start(0.0)
    ready(supervisor, "decode-0", 1.0)
    now = 1.0 + pause
    assert bad(supervisor, "decode-0", now, live=False) == []
    assert bad(supervisor, "prefill-0", now, live=False) == []
    assert supervisor.next_wake() is None
    assert supervisor.tick(now) == []
    assert ready(supervisor, "decode-0", now + 1.0) == []
    assert of_kind(ready(supervisor, "prefill-0", now + 1.0), Kill) == []


def test_stopping_goes_router_decode_prefill_and_kills_what_is_late() -> None:
    """Each tier is asked when the one before it has ended, and has its own grace."""
    supervisor = make_supervisor()
    all_ready(supervisor)
    assert of_kind(supervisor.stop(10.0), Terminate) == ["router"]
    assert supervisor.stop(11.0) == []
    assert of_kind(supervisor.exited("router", 1, "exit status 0", 12.0), Terminate) == ["decode-0", "decode-1"]
    assert of_kind(supervisor.exited("decode-0", 1, "exit status 0", 13.0), Terminate) == []
    assert supervisor.next_wake() == 22.0
    assert of_kind(supervisor.tick(22.0), Kill) == ["decode-1"]
    assert of_kind(supervisor.exited("decode-1", 1, "killed by SIGKILL", 22.1), Terminate) == ["prefill-0"]
    assert AllStopped() in supervisor.exited("prefill-0", 1, "exit status 0", 23.0)
    assert supervisor.service_state() == "stopped"


def test_a_pod_that_dies_while_another_tier_stops_is_not_started_again() -> None:
    """Stopping is for good."""
    supervisor = make_supervisor()
    all_ready(supervisor)
    supervisor.stop(10.0)
    assert of_kind(supervisor.exited("decode-0", 1, "killed by SIGKILL", 10.5), Spawn) == []
    assert supervisor.tick(1000.0) == [Kill("router", "did not stop within 10 s")]
    assert of_kind(supervisor.exited("router", 1, "killed by SIGKILL", 1000.1), Terminate) == ["decode-1"]


def test_killing_takes_everything_at_once() -> None:
    """The second Ctrl-C waits for no order."""
    supervisor = make_supervisor()
    all_ready(supervisor)
    supervisor.stop(10.0)
    assert of_kind(supervisor.kill(11.0), Kill) == ["prefill-0", "decode-0", "decode-1", "router"]


def test_giving_up_is_for_pods_that_never_were_ready() -> None:
    """After so many exits, or at once where another try is hopeless; a pod that was ready once is tried for ever."""
    supervisor = make_supervisor(give_up_after=3)
    supervisor.start(0.0)
    ready(supervisor, "decode-0", 0.1)
    for attempt in range(1, 5):
        assert of_kind(supervisor.exited("decode-0", attempt, "x", attempt * 100.0), GaveUp) == []
        supervisor.tick(attempt * 100.0 + 50.0)
    assert of_kind(supervisor.exited("decode-1", 1, "x", 500.0), GaveUp) == []
    supervisor.tick(500.5)
    supervisor.exited("decode-1", 2, "x", 501.0)
    supervisor.tick(502.0)
    assert of_kind(supervisor.exited("decode-1", 3, "x", 503.0), GaveUp) == ["decode-1"]
    assert of_kind(supervisor.exited("prefill-0", 1, "exit status 2", 504.0, hopeless=True), GaveUp) == ["prefill-0"]


def test_on_a_terminal_only_what_is_hopeless_is_given_up() -> None:
    """Without a limit a pod is started again, but not one that says that it can never work."""
    supervisor = make_supervisor()
    supervisor.start(0.0)
    for attempt in range(1, 20):
        assert of_kind(supervisor.exited("decode-0", attempt, "x", attempt * 100.0), GaveUp) == []
        assert of_kind(supervisor.tick(attempt * 100.0 + 50.0), Spawn) == ["decode-0"]
    effects = supervisor.exited("prefill-0", 1, "exit status 2", 2000.0, hopeless=True)
    assert of_kind(effects, GaveUp) == ["prefill-0"]
    assert [effect.retry_s for effect in effects if isinstance(effect, Changed)] == [0.0]


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(PodState, Trigger)))
def test_each_pair_of_the_table_is_legal_or_refused(state: PodState, trigger: Trigger) -> None:
    """The table names every legal pair; it leads nowhere from STOPPED, and never from no process to a running one
    except by START."""
    after = TRANSITIONS.get((state, trigger))
    if state is PodState.STOPPED:
        assert after is None
    if trigger is Trigger.EXITED:
        assert (after is not None) == (state in RUNNING)
    if after in RUNNING and state not in RUNNING:
        assert trigger is Trigger.START


def test_an_exit_without_a_process_is_an_error_of_the_shell() -> None:
    """The core refuses events that cannot be, and changes nothing."""
    supervisor = make_supervisor()
    supervisor.start(0.0)
    supervisor.exited("decode-0", 1, "x", 1.0)
    before = supervisor.view()
    with pytest.raises(IllegalTransitionError, match="decode-0: process 1 exited in state backoff"):
        supervisor.exited("decode-0", 1, "x", 1.0)
    assert supervisor.view() == before


@given(st.integers(1, 10_000))
def test_delays_never_exceed_the_cap(failures: int) -> None:
    """However often a pod has failed."""
    assert 0.5 <= backoff(failures, POLICY) <= 30.0


class World:
    """Performs effects on imaginary processes and checks that each effect is possible."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.alive: dict[str, int] = {}
        self.asked: set[str] = set()
        self.doomed: set[str] = set()
        self.attempts = {seat.name: 0 for seat in SEATS}
        self.stopping = False
        self.finished = 0

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Spawn(name, attempt):
                    assert not self.stopping
                    assert name not in self.alive
                    assert attempt == self.attempts[name] + 1
                    self.attempts[name] = self.alive[name] = attempt
                case Terminate(name):
                    assert self.stopping
                    assert name in self.alive
                    order = [seat.role for seat in SEATS if seat.name in self.alive]
                    if name.startswith("prefill"):
                        assert "decode" not in order
                    if not name.startswith("router"):
                        assert "router" not in order
                    self.asked.add(name)
                case Kill(name, _):
                    assert name in self.alive
                    self.doomed.add(name)
                case AllStopped():
                    assert not self.alive
                    self.finished += 1
                case _:
                    pass

    def exit(self, name: str, now: float) -> None:
        attempt = self.alive.pop(name)
        self.asked.discard(name)
        self.doomed.discard(name)
        self.perform(self.supervisor.exited(name, attempt, "gone", now))


moves = st.lists(
    st.tuples(st.sampled_from(["ok", "bad", "silent", "exit", "tick", "wait"]), st.integers(0, 3), st.floats(0, 40)),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(before=moves, after=moves)
def test_whatever_happens_effects_are_possible_and_stopping_ends(
    before: list[tuple[str, int, float]], after: list[tuple[str, int, float]]
) -> None:
    """Processes are started once at a time, stopped in order, and none is left; the end is told exactly once."""
    supervisor = make_supervisor()
    world = World(supervisor)
    now = 0.0
    world.perform(supervisor.start(now))
    for phase in (before, after):
        for move, index, delay in phase:
            now += delay
            name = SEATS[index].name
            if move == "exit" and name in world.alive:
                world.exit(name, now)
            elif move in ("ok", "bad", "silent") and name in world.alive:
                world.perform(
                    supervisor.probed(
                        name, world.alive[name], ready=move == "ok", live=move != "silent", reason="x", now=now
                    )
                )
            elif move == "tick":
                world.perform(supervisor.tick(now))
        if phase is before:
            world.stopping = True
            world.perform(supervisor.stop(now))
    for _ in range(20):
        for name in list(world.doomed):
            world.exit(name, now)
        wake = supervisor.next_wake()
        if wake is None:
            break
        now = max(now, wake)
        world.perform(supervisor.tick(now))
    assert not world.alive
    assert world.finished == 1
    assert supervisor.service_state() == "stopped"
