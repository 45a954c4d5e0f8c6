"""The simulated router: the real admission, pool, flows and budgets, over simulated links. It can die and come back."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry_router import failures
from kvferry_router import flow_messages as messages
from kvferry_router.admission import Admission
from kvferry_router.flow import RequestFlow
from kvferry_router.given import IdBudget
from kvferry_router.moves import Moves, Place
from kvferry_router.resumes import ResumeBudget, Suspects
from kvferry_router.select.candidates import Ask
from kvferry_router.select.policy import Decision, Policy
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import Alive, Frame
from kvferry_wire.handle import KVHandle
from kvferry_wire.leg import AnswerFormat, ChoiceState, Leg
from kvferry_wire.limits import Limits
from kvferry_wire.state import StateMessage
from tests.simulation import invariants
from tests.simulation.answers import DONE, read_ending
from tests.simulation.fabric import Fabric
from tests.simulation.links import Stream
from tests.simulation.pod import Pod
from tests.simulation.router_view import PodView
from tests.simulation.scenario import BLOCK_SIZE, Request, Scenario
from tests.simulation.world import Clock, Process, Timer, Violation, World

FREED_S = 2.0  # after the router's death nothing of its requests is at work at any pod


@dataclass(eq=False)
class Served:
    """One request at the router."""

    request: Request
    client: Stream
    flow: RequestFlow | None = None  # none while it waits
    timer: Timer | None = None
    legs: dict[int, Stream] = field(default_factory=dict)  # by attempt
    records: list[messages.Record] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # how legs failed
    cached: dict[str, int] = field(default_factory=dict)
    accepted_at: float = 0.0
    compat_hash: str = ""
    sent: int = 0
    over: bool = False  # the client was told of its end
    lost_at: float | None = None  # since when nothing goes on with its answer
    given_up_at: dict[int, float] = field(default_factory=dict)  # legs, by attempt, in the world's time
    told: str = ""  # of resumes, by the end of the answer


class RouterProcess(Process):
    def __init__(self, world: World, router: "Router", clock: Clock) -> None:
        super().__init__(world, router.name, clock)
        self._router = router

    def after_event(self) -> None:
        invariants.check_router(self._router)


class Router:
    """Moves what the router's cores say. One address; its lives follow each other."""

    def __init__(
        self, world: World, name: str, clock: Clock, fabric: Fabric, limits: Limits, scenario: Scenario
    ) -> None:
        self.name = name
        self.world = world
        self.fabric = fabric
        self.limits = limits
        self.process: Process = RouterProcess(world, self, clock)
        self.touched: Served | None = None  # in this event
        self.pauses = 0
        self.awake_since = 0.0
        self.deaths = 0
        self.policy = scenario.policy
        self._min_prefill_tokens = scenario.min_prefill_tokens
        self._rng: random.Random = world.rng(name)
        self._forger = world.rng(f"forger/{name}")
        self._late = world.rng(f"late/{name}")
        self._handles: list[KVHandle] = []
        fabric.routers[name] = self

    # ---- life

    def start(self) -> None:
        """A new life, which knows nothing of the one before."""
        self.process.up = True
        self.awake_since = self.world.now
        self.admission = Admission(self.limits)
        self.budget = IdBudget(self.limits)
        self.resumes = ResumeBudget(self.limits)
        self.moves = Moves(self.limits)
        self.suspects = Suspects(self.limits)
        self.served: dict[str, Served] = {}
        self.by_client: dict[Stream, Served] = {}
        self.by_name: dict[str, Served] = {}  # also those that are over
        self.stopping = False
        policy = Policy(disaggregate_min_tokens=self._min_prefill_tokens)
        must_ferry = self.policy == "fail"
        self.view = PodView(self.process, self.fabric, self.limits, policy, self._rng, must_ferry=must_ferry)
        self._look_around()

    def _look_around(self) -> None:
        invariants.check_old_legs(self)
        self._move_legs()
        self.process.soon(0.2, self._look_around)

    def _move_legs(self) -> None:
        """Ask legs to leave pods that drain."""
        running = {
            Place(name, *at, len(served.request.prompt) + served.request.sampling.max_tokens): served
            for name, served in self.served.items()
            if served.flow is not None and (at := served.flow.movable()) is not None
        }
        for place in self.moves.due(running, self.view.pool.leaving(), self.process.now):
            flow, pod = running[place].flow, self.fabric.pods[place.pod]
            assert flow is not None
            flow.asked_to_move()

            def deliver(_: str, pod: Pod = pod, place: Place = place) -> None:
                pod.server.on_handoff(place.internal_id, place.attempt)

            what = f"move {place.internal_id}#{place.attempt}"
            self.fabric.message("http", self.name, pod.process, deliver, place.internal_id, what)

    def stop(self) -> None:
        """Told to stop, with no grace: what is under way ends in an error, what comes is refused."""
        self.stopping = True
        for served in tuple(self.served.values()):
            if served.flow is not None:
                self.feed(served, messages.Stopping())
            elif served.request.name in self.served:
                self._refuse(served, failures.STOPPING)

    def die(self) -> None:
        """Its machine goes on, and closes its connections."""
        self.deaths += 1
        for name in self.served:
            self.world.at(self.world.now + FREED_S, None, invariants.check_freed, (name, self.fabric))
        self.process.die()
        self.fabric.cut_streams(self.name, at_once=True)

    def restart(self) -> None:
        if not self.process.up:
            self.world.log(self.name, "", "starts again")
            self.start()

    # ---- clients

    def on_message(self, stream: Stream, request: Request) -> None:
        served = Served(request, stream, accepted_at=self.process.now)
        self.served[request.name] = served
        self.by_client[stream] = self.by_name[request.name] = served
        if self.stopping:
            self._refuse(served, failures.STOPPING)
            return
        answer = self.admission.arrive(request.name)
        self.process.log(request.name, f"arrives: {answer}")
        if answer == "run":
            self._begin(served)
        elif answer == "wait":
            self.fabric.reached(request.name, "router_queue")
            served.timer = Timer(self.process, lambda: self._waited_too_long(served))
            served.timer.set(self.process.now + min(self.limits.queue_wait_s, request.deadline_s))
        else:
            self._refuse(served, failures.QUEUE_FULL)

    def on_close(self, stream: Stream) -> None:
        """The client has left."""
        served = self.by_client.get(stream)
        if served is None:
            return  # of an earlier life
        if served.flow is not None:
            self.feed(served, messages.ClientGone())
        elif served.request.name in self.served:
            if served.timer is not None:
                served.timer.set(None)
            self._leave(served)

    def on_cut(self, stream: Stream) -> None:
        self.on_close(stream)

    def _waited_too_long(self, served: Served) -> None:
        if served.flow is None:
            self._refuse(served, failures.QUEUE_FULL)

    def _refuse(self, served: Served, failure: messages.Failure) -> None:
        served.client.send(1, messages.FailAnswer(failure, in_band=False))
        served.client.close(1)
        self._leave(served)

    def _leave(self, served: Served) -> None:
        self.served.pop(served.request.name, None)
        for name in self.admission.leave(served.request.name):
            self._begin(self.served[name])

    # ---- a request begins

    def _begin(self, served: Served) -> None:
        if served.timer is not None:
            served.timer.set(None)
        request = served.request
        leg = self._first_leg(request)
        if self.suspects.holds(leg, self.process.now):
            self._refuse(served, failures.BARREN)
            return
        decision = self.view.pool.choose(self._ask(request), self.view.hashes(request), self.process.now)
        self._note(served, decision)
        if decision.decode is None:
            self._refuse(served, failures.NO_CAPACITY)
            return
        served.compat_hash = decision.compat_hash
        served.flow = RequestFlow(
            leg,
            self.limits,
            deadline_s=request.deadline_s,
            accepted_at=served.accepted_at,
            policy=self.policy,
            budget=self.budget,
        )
        served.timer = Timer(self.process, lambda: self.feed(served, messages.Tick()))
        self.feed(served, messages.Start(decision.prefill, decision.decode, decision.compat_hash))

    @staticmethod
    def _first_leg(request: Request) -> Leg:
        return Leg(
            internal_id=request.name,
            attempt=0,
            request_id=request.name,
            deadline_ms=0,
            prompt_ids=request.prompt,
            choices=tuple([ChoiceState() for _ in range(request.n)]),
            sampling=request.sampling,
            format=AnswerFormat(
                kind="completion", stream=request.stream, include_usage=False, response_id="r", created=1, model="toy"
            ),
            extras=KeyExtras(tenant_salt=request.salt),
        )

    @staticmethod
    def _ask(request: Request) -> Ask:
        answer = request.sampling.max_tokens
        return Ask(request.name, len(request.prompt), answer, request.n * answer, "text")

    def _note(self, served: Served, decision: Decision) -> None:
        for scores in decision.scores.values():
            served.cached |= {s.pod: int(s.terms["cached_tokens"]) for s in scores if "cached_tokens" in s.terms}
        self.process.log(
            served.request.name, f"{decision.reason}: prefill {decision.prefill}, decode {decision.decode}"
        )

    # ---- flows

    def feed(self, served: Served, event: messages.Event) -> None:
        assert served.flow is not None and served.timer is not None
        self.touched = served
        pending = [event]
        while pending:
            for effect in served.flow.handle(pending.pop(0), self.process.now):
                answer = self._perform(served, effect)
                if answer is not None:
                    pending.append(answer)
        due = served.flow.next_wakeup()
        if isinstance(event, messages.Tick) and due is not None and due <= self.process.now:
            raise Violation("busy_wait", f"{served.flow} is due again at once", served.request.name)
        served.timer.set(due)
        open_ = served.flow._attempts.open
        for attempt in range(served.flow._attempts.opened):
            if open_ is None or attempt != open_.number:
                served.given_up_at.setdefault(attempt, self.world.now)

    def _perform(self, served: Served, effect: messages.Effect) -> messages.Event | None:
        name, pool = served.request.name, self.view.pool
        match effect:
            case messages.Book():
                self._book(served, effect)
            case messages.Computed(kind, _):
                pool.bookings.computed((name, kind))
            case messages.Release(kind, _):
                pool.bookings.release((name, kind))
            case messages.NeedPod():
                return self._choose_again(served, effect)
            case messages.OpenLeg(kind, pod, leg):
                self._open_leg(served, kind, pod, leg)
            case messages.FinishLeg():
                pass  # the stream is left to close by itself
            case messages.AbortLeg(attempt, pod):
                self._abort_leg(served, attempt, pod)
            case messages.PodFailed():
                self._pod_failed(served, effect)
            case messages.Ferried(prefill, decode, reason):
                pool.ferried(prefill, decode, reason, self.process.now)
                self.world.count("pairs_barred", len(pool.barred(self.process.now)))
            case messages.Resumed(cause, gap_s):
                served.lost_at = None
                self.world.count(f"resumed_{cause}")
                self.process.log(name, f"resumed after {cause}, {gap_s:.3f} s")
            case messages.Send() | messages.FinishAnswer() | messages.FailAnswer():
                self._tell(served, effect)
            case messages.Record():
                self._record(served, effect)
        return None

    def _book(self, served: Served, effect: messages.Book) -> None:
        request, decode = served.request, effect.kind == "decode"
        uncached = max(0, len(request.prompt) - served.cached.get(effect.pod, 0))
        growth = request.n * request.sampling.max_tokens
        self.view.pool.bookings.book(
            (request.name, effect.kind),
            effect.pod,
            prefill_tokens=uncached if effect.computes else 0,
            decode_blocks=-(-(len(request.prompt) + growth) // BLOCK_SIZE) if decode else 0,
        )

    def _choose_again(self, served: Served, need: messages.NeedPod) -> messages.PodChosen:
        if need.resume and not self.resumes.take(self.process.now):
            self.world.count("resumes_that_waited")
            return messages.PodChosen(need.kind, None)
        request, pool = served.request, self.view.pool
        decision = pool.choose_again(self._ask(request), self.view.hashes(request), self.process.now, need)
        self._note(served, decision)
        chosen = decision.prefill if need.kind == "prefill" else decision.decode
        self.world.count("legs_tried_again" if chosen else "no_other_pod")
        if need.kind == "prefill":
            return messages.PodChosen("prefill", chosen)
        if decision.prefill is not None:
            self.world.count("resumed_by_a_pair")
        return messages.PodChosen("decode", chosen, decision.prefill)

    def _pod_failed(self, served: Served, effect: messages.PodFailed) -> None:
        self.world.count(f"{effect.kind}_{effect.reason}")
        served.lost_at = self.process.now if served.lost_at is None else served.lost_at
        served.lost.append(effect.reason)
        self.process.log(served.request.name, f"{effect.kind} leg at {effect.pod}: {effect.reason}")
        if effect.reason in ("dead", "stalled"):
            self.view.suspect(effect.pod, effect.reason)

    def _tell(self, served: Served, effect: messages.Send | messages.FinishAnswer | messages.FailAnswer) -> None:
        if served.over:
            raise Violation("two_ends", f"{effect} after the end", served.request.name)
        served.client.send(1, effect)
        if isinstance(effect, messages.Send):
            served.sent += 1
            self.fabric.reached(served.request.name, "first_token" if served.sent == 1 else "mid_stream")
            return
        if isinstance(effect, messages.FinishAnswer) and effect.stream:
            served.told = read_ending(effect.data.partition(DONE)[2]).resumed
        served.over = True
        self.process.log(served.request.name, _told(effect))
        served.client.close(1)

    def _record(self, served: Served, record: messages.Record) -> None:
        served.records.append(record)
        self.world.count(f"outcome_{record.outcome}")
        if len(record.resumed) > 1 and record.outcome == "ok":
            self.world.count("answers_of_three_pods_or_more")
        if record.gave_up is not None:
            self.world.count(f"gave_up_{record.gave_up}")
            self.process.log(served.request.name, f"given up: {record.gave_up}, lost {served.lost}")
            if record.gave_up == "barren" and served.flow is not None:
                self.suspects.add(self._first_leg(served.request), self.process.now)
        if record.recomputed:
            self.world.count("recomputed")
            self.fabric.forged.discard(served.request.name)
        self._leave(served)

    # ---- legs

    def _open_leg(self, served: Served, kind: messages.Kind, pod_name: str, leg: Leg) -> None:
        request, pod = served.request.name, self.fabric.pods[pod_name]
        self.process.log(request, f"opens {kind} leg {leg.attempt} at {pod_name}")
        if leg.handle is not None:
            leg = msgspec.structs.replace(leg, handle=self._perhaps_forged(leg.handle, request))
        end = _LegEnd(self, served, leg.attempt)
        wire = self.fabric.wire("http", self.name, pod_name)
        connect = wire.delay() + (5.0 if wire.partitioned() else 0.0)
        if not pod.process.up or connect > self.limits.connect_timeout_s:
            self.process.soon(min(connect, self.limits.connect_timeout_s), end.closed, "refused")
            return
        stream = self.fabric.stream("http", request, (end, pod.server), self.process, pod.process)
        served.legs[leg.attempt] = stream
        stream.send(0, (kind, leg))

    def _abort_leg(self, served: Served, attempt: int, pod_name: str) -> None:
        stream = served.legs.get(attempt)
        if stream is not None:
            # What has been read from the connection already may still be told.
            stream.close(0, deaf=self._late.random() < 0.5)
        pod = self.fabric.pods[pod_name]
        name = served.request.name
        self.process.log(name, f"aborts leg {attempt} at {pod_name}")

        def deliver(_: str) -> None:
            pod.server.on_abort(name, attempt)

        self.fabric.message("http", self.name, pod.process, deliver, name, f"abort {name}#{attempt}")

    def on_leg(self, served: Served, event: messages.LegFrames | messages.LegClosed) -> None:
        self.feed(served, event)

    def _perhaps_forged(self, handle: KVHandle, request: str) -> KVHandle:
        """Now and then the handle is another request's, or was changed on its way."""
        self._handles.append(handle)
        if not self._forger.random() < self.fabric.profile.forged:
            return handle
        if self._forger.random() < 0.7:
            # Another prompt's of the same length: for the same prompt it would be as good as its own.
            others = [
                each
                for each in self._handles[:-1]
                if each.token_count == handle.token_count and each.prompt_digest != handle.prompt_digest
            ]
            if others:
                self.world.count("handles_swapped")
                self.fabric.forged.add(request)
                self.process.log(request, "its handle is swapped for another request's")
                return self._forger.choice(others)
            return handle
        self.world.count("handles_changed")
        self.fabric.forged.add(request)
        self.process.log(request, "its handle is changed")
        lease = self._forger.choice([each.lease_id for each in self._handles])
        return msgspec.structs.replace(handle, lease_id=lease + 1, token_count=handle.token_count + 1)

    # ---- the pods' state

    def on_state(self, pod: str, message: StateMessage) -> None:
        self.view.on_state(pod, message)

    @property
    def rests(self) -> bool:
        pool, admission = self.view.pool, self.admission
        return (
            self.process.up
            and not self.served
            and not len(pool.bookings)
            and not admission.running
            and not admission.waiting
            and not self.budget.held
        )

    def leftovers(self) -> str:
        flows = [served.flow for served in self.served.values()]
        return (
            f"{self.name}: requests {flows}, bookings {len(self.view.pool.bookings)}, "
            f"running {self.admission.running}, ids {self.budget.held}"
        )


class _LegEnd:
    """The router's end of one leg's stream."""

    def __init__(self, router: Router, served: Served, attempt: int) -> None:
        self._router = router
        self._served = served
        self._attempt = attempt

    def on_message(self, stream: Stream, frame: Frame) -> None:
        if not isinstance(frame, Alive):
            self._router.process.log(self._served.request.name, f"leg {self._attempt}: {_frame(frame)}")
        self._router.on_leg(self._served, messages.LegFrames(self._attempt, (frame,)))

    def on_close(self, stream: Stream) -> None:
        self.closed("ended")

    def on_cut(self, stream: Stream) -> None:
        self.closed("cut")

    def closed(self, cause: messages.CloseCause) -> None:
        self._served.legs.pop(self._attempt, None)
        self._router.process.log(self._served.request.name, f"leg {self._attempt} closed: {cause}")
        self._router.on_leg(self._served, messages.LegClosed(self._attempt, cause))


def _frame(frame: Any) -> str:
    name = type(frame).__name__
    match name:
        case "Tokens":
            return f"Tokens[{frame.choice}] {list(frame.ids)} {frame.data!r}"
        case "Prefilled":
            lease = None if frame.handle is None else frame.handle.lease_id
            return f"Prefilled {list(frame.first)} lease {lease}"
        case "End":
            return f"End {frame.finish} {frame.recomputed}"
        case _:
            return f"{name} {getattr(frame, 'kind', '')}"


def _told(effect: messages.FinishAnswer | messages.FailAnswer) -> str:
    if isinstance(effect, messages.FinishAnswer):
        return f"answer complete, path {effect.path}"
    return f"answer fails: {effect.failure.code}, in band {effect.in_band}"
