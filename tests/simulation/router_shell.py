"""The simulated router: the real admission, selection, bookings, index, feeds and flows, over simulated links."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry_router import failures
from kvferry_router import flow_messages as messages
from kvferry_router.admission import Admission
from kvferry_router.bookings import Bookings
from kvferry_router.flow import RequestFlow
from kvferry_router.index.feed import FeedEffect, FetchSnapshot, Forget, Remove, Replace, StateFeed, Store
from kvferry_router.index.prefix_index import PrefixIndex
from kvferry_router.select.candidates import Ask, Candidate
from kvferry_router.select.policy import Policy, choose, choose_again
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import Alive, Frame
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import chain_hashes
from kvferry_wire.leg import AnswerFormat, ChoiceState, Leg
from kvferry_wire.limits import Limits
from kvferry_wire.state import Snapshot, StateMessage
from tests.simulation import invariants
from tests.simulation.fabric import COMPAT, KEYS, Fabric
from tests.simulation.links import Stream
from tests.simulation.scenario import BLOCK_SIZE, Request
from tests.simulation.world import Clock, Process, Timer, World

_FEED_TICK_S = 0.3


@dataclass(eq=False)
class Served:
    """One request at the router."""

    request: Request
    client: Stream
    flow: RequestFlow | None = None  # none while it waits
    timer: Timer | None = None
    legs: dict[int, Stream] = field(default_factory=dict)  # by attempt
    records: list[messages.Record] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    accepted_at: float = 0.0


class RouterProcess(Process):
    def __init__(self, world: World, router: "Router", clock: Clock) -> None:
        super().__init__(world, "router", clock)
        self._router = router

    def after_event(self) -> None:
        invariants.check_router(self._router)


class Router:
    """Moves what the router's cores say."""

    def __init__(self, world: World, clock: Clock, fabric: Fabric, limits: Limits, min_prefill_tokens: int) -> None:
        self.world = world
        self.fabric = fabric
        self.limits = limits
        self.process: Process = RouterProcess(world, self, clock)
        self.admission = Admission(limits)
        self.bookings = Bookings()
        self.index = PrefixIndex(limits.index_blocks)
        self.served: dict[str, Served] = {}
        self.by_client: dict[Stream, Served] = {}
        self.touched: Served | None = None  # in this event
        self.pauses = 0
        self._policy = Policy(disaggregate_min_tokens=min_prefill_tokens)
        self._rng: random.Random = world.rng("router")
        self._forger = world.rng("forger")
        self._late = world.rng("late")
        self._handles: list[KVHandle] = []
        self._feeds = {name: StateFeed(limits) for name in fabric.pods}
        for feed in self._feeds.values():
            feed.start(self.process.now)
        self._ready = dict.fromkeys(fabric.pods, True)  # as of the last look
        fabric.router = self
        self._tick_feeds()

    # ---- clients

    def on_message(self, stream: Stream, request: Request) -> None:
        served = Served(request, stream, accepted_at=self.process.now)
        self.served[request.name] = served
        self.by_client[stream] = served
        answer = self.admission.arrive(request.name)
        self.process.log(request.name, f"arrives: {answer}")
        if answer == "run":
            self._begin(served)
        elif answer == "wait":
            served.timer = Timer(self.process, lambda: self._waited_too_long(served))
            served.timer.set(self.process.now + min(self.limits.queue_wait_s, request.deadline_s))
        else:
            self._refuse(served, failures.QUEUE_FULL)

    def on_close(self, stream: Stream) -> None:
        """The client has left."""
        served = self.by_client[stream]
        if served.flow is not None:
            self._feed(served, messages.ClientGone())
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
        extras = KeyExtras(tenant_salt=request.salt)
        served.cached = self.index.match(chain_hashes(KEYS.hash, request.prompt, BLOCK_SIZE, extras))
        decision = choose(self._ask(served), self._candidates(served), self._policy, self._rng)
        self.process.log(request.name, f"{decision.reason}: prefill {decision.prefill}, decode {decision.decode}")
        if decision.decode is None:
            self._refuse(served, failures.NO_CAPACITY)
            return
        leg = Leg(
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
            extras=extras,
        )
        served.flow = RequestFlow(leg, self.limits, deadline_s=request.deadline_s, accepted_at=served.accepted_at)
        served.timer = Timer(self.process, lambda: self._feed(served, messages.Tick()))
        self._feed(served, messages.Start(decision.prefill, decision.decode, decision.compat_hash))

    def _ask(self, served: Served, excluded: frozenset[str] = frozenset(), compat_hash: str = "") -> Ask:
        request = served.request
        growth = request.n * request.sampling.max_tokens
        return Ask(request.name, len(request.prompt), growth, "text", excluded, compat_hash)

    def _candidates(self, served: Served) -> list[Candidate]:
        found = []
        for name, pod in self.fabric.pods.items():
            feed = self._feeds[name]
            fresh = feed.fresh(self.process.now)
            found.append(
                Candidate(
                    name=name,
                    role=pod.setup.role,
                    compat_hash=COMPAT,
                    text_digest="text",
                    block_size=BLOCK_SIZE,
                    total_blocks=pod.setup.blocks,
                    max_running=pod.setup.max_running,
                    max_model_len=pod.config.max_model_len,
                    kv_bytes_per_token=16,
                    ready=self._ready[name],
                    draining=False,
                    cached_blocks=served.cached.get(name, 0) if fresh else 0,
                    load=feed.load if fresh else None,
                    bookings=self.bookings.of(name),
                )
            )
        return found

    # ---- flows

    def _feed(self, served: Served, event: messages.Event) -> None:
        assert served.flow is not None and served.timer is not None
        self.touched = served
        pending = [event]
        while pending:
            for effect in served.flow.handle(pending.pop(0), self.process.now):
                answer = self._perform(served, effect)
                if answer is not None:
                    pending.append(answer)
        served.timer.set(served.flow.next_wakeup())

    def _perform(self, served: Served, effect: messages.Effect) -> messages.Event | None:
        name = served.request.name
        match effect:
            case messages.Book(kind, pod, computes):
                cached = served.cached.get(pod, 0) * BLOCK_SIZE
                growth = served.request.n * served.request.sampling.max_tokens if kind == "decode" else 0
                self.bookings.book(
                    (name, kind),
                    pod,
                    prefill_tokens=max(0, len(served.request.prompt) - cached) if computes else 0,
                    decode_blocks=-(-(len(served.request.prompt) + growth) // BLOCK_SIZE) if kind == "decode" else 0,
                )
            case messages.Computed(kind, _):
                self.bookings.computed((name, kind))
            case messages.Release(kind, _):
                self.bookings.release((name, kind))
            case messages.NeedPod():
                return self._choose_again(served, effect)
            case messages.OpenLeg(kind, pod, leg):
                self._open_leg(served, kind, pod, leg)
            case messages.FinishLeg():
                pass  # the stream is left to close by itself
            case messages.AbortLeg(attempt, pod):
                self._abort_leg(served, attempt, pod)
            case messages.Ferried():
                pass
            case messages.Resumed(cause, gap_s):
                self.world.count(f"resumed_{cause}")
                self.process.log(name, f"resumed after {cause}, {gap_s:.3f} s")
            case messages.PodFailed(pod, kind, reason):
                self.world.count(f"{kind}_{reason}")
                self.process.log(name, f"{kind} leg at {pod}: {reason}")
            case messages.Send() | messages.FinishAnswer() | messages.FailAnswer():
                served.client.send(1, effect)
                if not isinstance(effect, messages.Send):
                    self.process.log(name, _told(effect))
                    served.client.close(1)
            case messages.Record():
                served.records.append(effect)
                self.world.count(f"outcome_{effect.outcome}")
                if effect.recomputed:
                    self.world.count("recomputed")
                    self.fabric.forged.discard(name)
                self._leave(served)
        return None

    def _choose_again(self, served: Served, need: messages.NeedPod) -> messages.PodChosen:
        ask = self._ask(served, need.excluded, need.compat_hash)
        candidates = self._candidates(served)
        if need.resume and not need.ferried:
            decision = choose(ask, candidates, self._policy, self._rng)
        else:
            decision = choose_again(ask, candidates, self._policy, self._rng, kind=need.kind, ferried=need.ferried)
        chosen = decision.prefill if need.kind == "prefill" else decision.decode
        self.world.count("legs_tried_again" if chosen else "no_other_pod")
        self.process.log(served.request.name, f"another {need.kind} pod: {chosen} {decision.prefill}")
        if need.kind == "prefill":
            return messages.PodChosen("prefill", chosen)
        return messages.PodChosen("decode", chosen, decision.prefill)

    # ---- legs

    def _open_leg(self, served: Served, kind: messages.Kind, pod_name: str, leg: Leg) -> None:
        request, pod = served.request.name, self.fabric.pods[pod_name]
        self.process.log(request, f"opens {kind} leg {leg.attempt} at {pod_name}")
        if leg.handle is not None:
            leg = msgspec.structs.replace(leg, handle=self._perhaps_forged(leg.handle, request))
        end = _LegEnd(self, served, leg.attempt)
        wire = self.fabric.wire("http", "router", pod_name)
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

        self.fabric.message("http", "router", pod.process, deliver, name, f"abort {name}#{attempt}")

    def on_leg(self, served: Served, event: messages.LegFrames | messages.LegClosed) -> None:
        self._feed(served, event)

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
        self._apply(pod, self._feeds[pod].message(message, self.process.now))

    def _tick_feeds(self) -> None:
        for name, feed in self._feeds.items():
            self._apply(name, feed.tick(self.process.now))
            process = self.fabric.pods[name].process
            self._ready[name] = process.up and not process.paused
        self.process.soon(_FEED_TICK_S, self._tick_feeds)

    def _apply(self, pod: str, effects: list[FeedEffect]) -> None:
        for effect in effects:
            match effect:
                case FetchSnapshot(number):
                    process = self.fabric.pods[pod].process
                    self.fabric.message("state", "router", process, self._asked_for_snapshot, "", pod, number)
                    self.process.soon(1.0, self._snapshot_late, pod, number)
                case Replace(hashes):
                    self.index.drop(pod)
                    self.index.store(pod, hashes)
                case Store(hashes):
                    self.index.store(pod, hashes)
                case Remove(hashes):
                    self.index.remove(pod, hashes)
                case Forget():
                    self.index.drop(pod)

    def _asked_for_snapshot(self, pod: str, number: int) -> None:
        snapshot = self.fabric.pods[pod].snapshot()
        self.fabric.message("state", pod, self.process, self._on_snapshot, "", pod, number, snapshot)

    def _on_snapshot(self, pod: str, number: int, snapshot: Snapshot) -> None:
        self._apply(pod, self._feeds[pod].snapshot(number, snapshot, self.process.now))

    def _snapshot_late(self, pod: str, number: int) -> None:
        self._apply(pod, self._feeds[pod].snapshot_failed(number, self.process.now))

    def index_lags(self) -> str:
        """Where the index differs from what pods have; empty when it does not."""
        self.index.check_integrity()
        for name, pod in self.fabric.pods.items():
            held = self.index._held.get(name, set())
            if self._feeds[name].incarnation != pod.incarnation or held != set(pod.core.snapshot_hashes()):
                return f"{name}: {self._feeds[name]!r} gave {len(held)} of {len(pod.core.snapshot_hashes())} blocks"
        return ""

    @property
    def rests(self) -> bool:
        return not self.served and not len(self.bookings) and not self.admission.running and not self.admission.waiting

    def leftovers(self) -> str:
        flows = [served.flow for served in self.served.values()]
        return f"router: requests {flows}, bookings {len(self.bookings)}, running {self.admission.running}"


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
