"""One request's way through the pods: prefill, decode, and another pod when one fails.

Pure: ``handle`` takes an event and the time and returns effects; it reads no clock and opens no socket. The table in
``flow_states`` names the method for each state and event, so each pair is decided in one place. What the answer has
become is in ``answer``, the open leg in ``attempts``, what pods keep for it in ``holdings``, what went wrong in
``losses``.

Rules:

- A leg's frames count whole or not at all. A leg that sends no frame for the stall timeout is dead.
- Prefill that fails is tried on another pod, then the service's failure policy decides: decode does the whole job, or
  the request fails. A resumed answer tries one prefill pod, and then decode does the whole job whatever the policy.
- A decode leg that is lost is continued on another pod, or on the same one once it is back: the ids recorded so far
  are input of the next leg and never picked again (``losses`` says which pods, for how long and how often).
- A pod that broke the protocol is not believed: what came of its leg is forgotten, and if the client has some of it,
  the answer fails.
- An answer that fails once the client has bytes ends in an error event and a cut stream, never ``[DONE]``.
- ``End`` is passed on when the leg's stream is over (or ``Limits.end_grace_s`` later), and only if nothing follows it.
- A router that stops fails its answers as a pod's loss would, except one whose `End` is here.
- A leg whose pod said that it failed, or refused it, is over there and is not aborted.
- A handle that was received and led to no answer is withdrawn: the prefill leg is aborted by name after its end.
- A leg that was asked to leave its pod ends in `Handoff`, as prefill's does in `Prefilled`: another pod goes on with
  its KV, or without it. That is no loss.
"""

from kvferry_router import failures, leg_faults
from kvferry_router.answer import Answer
from kvferry_router.attempts import Attempts
from kvferry_router.flow_messages import (
    ClientGone,
    Effect,
    Event,
    Failure,
    FailurePolicy,
    GaveUp,
    Kind,
    LegClosed,
    LegFrames,
    NeedPod,
    OpenLeg,
    Outcome,
    PodChosen,
    PodFailed,
    Start,
    Stopping,
    Tick,
)
from kvferry_router.flow_states import TRANSITIONS, IllegalEventError, State
from kvferry_router.given import Given, IdBudget
from kvferry_router.holdings import Holdings
from kvferry_router.losses import Losses
from kvferry_router.next_leg import decode_leg, next_leg
from kvferry_wire.frames import Alive, Begun, End, Fail, Frame, Handoff, Prefilled, Tokens
from kvferry_wire.leg import ChoiceState, Leg
from kvferry_wire.limits import Limits

_WAITING = (State.WAITING_FOR_PREFILL, State.WAITING_FOR_DECODE)


class RequestFlow:
    """The state of one request.

    Args:
        leg: the request as its first leg; what differs from leg to leg is set per leg.
        limits: deadlines and caps.
        deadline_s: seconds from ``accepted_at`` to the end of the answer.
        accepted_at: the time, on the clock of all later events.
        policy: what the service asks for when KV cannot be ferried.
        budget: room for the ids that all flows keep; without one this flow has its own.
    """

    def __init__(
        self,
        leg: Leg,
        limits: Limits,
        *,
        deadline_s: float,
        accepted_at: float,
        policy: FailurePolicy = "recompute",
        budget: IdBudget | None = None,
    ) -> None:
        self.state = State.NEW
        self._leg = leg
        self._limits = limits
        self._policy = policy
        self._deadline_at = accepted_at + deadline_s
        self._prefill_share_s = deadline_s * limits.prefill_share

        self._answer = Answer(leg, Given(leg.choices, limits, budget or IdBudget(limits)), accepted_at)
        self._attempts = Attempts(limits)
        self._holds = Holdings()
        self._losses = Losses(limits)
        self._until = 0.0  # of a prefill leg: its share of the deadline; waiting: the next look; ending: the grace

        self._compat_hash = ""
        self._prefill_pod: str | None = None
        self._decode_pod = ""
        self._prefill_legs = 0
        self._prefill_until = 0.0  # while decode has nothing: no prefill pod is waited for after this

    def __repr__(self) -> str:
        return (
            f"RequestFlow({self._leg.internal_id}, {self.state.value}, {self._attempts!r}, "
            f"tokens={self._answer.given.tokens}, {self._losses!r})"
        )

    # ---- the outside -------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order.

        Raises:
            IllegalEventError: the event cannot happen in this state (the caller's bug).
        """
        name = TRANSITIONS[self.state, type(event)]
        if name is None:
            raise IllegalEventError(self.state, event)
        effects: list[Effect] = []
        getattr(self, name)(event, now, effects)
        return effects

    def next_wakeup(self) -> float | None:
        """When a ``Tick`` is due; ``None`` when none is."""
        if self.state is State.DONE:
            return None
        if self.state is State.ENDING:
            return self._until  # the answer is whole, whatever else is due
        times = [self._deadline_at]
        stalls_at = self._attempts.stalls_at()
        if stalls_at is not None:
            times.append(stalls_at)
        if self.state in (State.PREFILLING, *_WAITING):
            times.append(self._until)
        return min(times)

    def choices(self) -> tuple[ChoiceState, ...]:
        """What each choice has given so far: all that another pod needs to go on."""
        return self._answer.given.states()

    def booked(self) -> dict[Kind, str]:
        """Bookings that were not released yet."""
        return self._holds.booked()

    def movable(self) -> tuple[int, str] | None:
        """The decode leg that another pod could go on from: its attempt and pod."""
        leg = self._attempts.open
        if leg is None or leg.kind != "decode" or self.state is State.ENDING or not self._answer.given.kept:
            return None
        return leg.number, leg.pod

    def asked_to_move(self) -> None:
        """The movable leg is being asked to leave its pod: from now on it may."""
        self._attempts.the_open.asked_to_move = True

    # ---- start and choice of pods ------------------------------------------------------------------------------

    def _start(self, event: Start, now: float, out: list[Effect]) -> None:
        if now >= self._deadline_at:  # it waited its time away
            self._fail(failures.DEADLINE, now, out)
            return
        self._compat_hash = event.compat_hash
        self._prefill_until = min(self._deadline_at, now + self._prefill_share_s)
        if event.prefill is not None:
            self._answer.path = "disaggregated"
        self._begin_on(event.prefill, event.decode, now, out)

    def _begin_on(self, prefill: str | None, decode: str, now: float, out: list[Effect]) -> None:
        self._decode_pod = decode
        self._holds.book("decode", decode, out, computes=prefill is None and self._holds.handle is None)
        if prefill is None:
            self._open_decode(now, out)
        else:
            self._holds.book("prefill", prefill, out)
            self._open_prefill(prefill, now, out)

    def _choose_prefill(self, out: list[Effect]) -> None:
        self.state = State.CHOOSING_PREFILL
        # The decode pod is never its own prefill pod.
        excluded = self._losses.excluded("prefill") | {self._decode_pod}
        out.append(NeedPod("prefill", excluded, self._compat_hash, beside=self._decode_pod))

    def _choose_decode(self, out: list[Effect]) -> None:
        self.state = State.CHOOSING_DECODE
        excluded, resume, lender = self._losses.excluded("decode"), self._answer.begun, self._holds.lease_pod
        if resume:
            excluded |= self._losses.excluded("prefill")
        ferried = lender is not None
        out.append(NeedPod("decode", excluded, self._compat_hash, beside=lender, ferried=ferried, resume=resume))

    def _prefill_chosen(self, event: PodChosen, now: float, out: list[Effect]) -> None:
        self._expect_kind("prefill", event)
        if event.pod is None:
            self._without_prefill(now, out)
            return
        self._holds.book("prefill", event.pod, out)
        self._open_prefill(event.pod, now, out)

    def _decode_chosen(self, event: PodChosen, now: float, out: list[Effect]) -> None:
        self._expect_kind("decode", event)
        if event.pod is not None:
            self._begin_on(event.prefill, event.pod, now, out)
            return
        again_at = self._losses.pause(now, self._losses.worth_waiting_until(now, patient=self._patient()))
        if again_at is None:
            self._give_up("no_pod", self._losses.error, now, out)
        else:
            self.state, self._until = State.WAITING_FOR_DECODE, again_at

    def _expect_kind(self, kind: Kind, event: PodChosen) -> None:
        if event.kind != kind:
            raise IllegalEventError(self.state, event)

    def _without_prefill(self, now: float, out: list[Effect]) -> None:
        """No prefill pod is left to be tried: what the service asks for in such a case."""
        full = self._losses.prefill_is_full
        again_at = self._losses.pause(now, self._prefill_until) if full else None
        if self._policy == "recompute" or self._answer.begun or (self._policy == "retry" and again_at is None):
            self._decode_alone(now, out)
        elif again_at is not None:
            self.state, self._until = State.WAITING_FOR_PREFILL, again_at
        else:
            self._give_up("transfer", failures.BUSY if full else failures.TRANSFER_FAILED, now, out)

    def _decode_alone(self, now: float, out: list[Effect]) -> None:
        """Decode computes the prompt as well, and is booked for it."""
        self._holds.release("decode", out)
        self._begin_on(None, self._decode_pod, now, out)

    def _open_prefill(self, pod: str, now: float, out: list[Effect]) -> None:
        self.state = State.PREFILLING
        self._prefill_pod = pod
        self._prefill_legs += 1
        self._until = min(self._deadline_at, now + self._prefill_share_s)
        self._open_leg("prefill", pod, self._until, now, out)

    def _open_decode(self, now: float, out: list[Effect]) -> None:
        self.state = State.STREAMING if self._answer.sent else State.DECODING
        self._open_leg("decode", self._decode_pod, self._deadline_at, now, out)

    def _open_leg(self, kind: Kind, pod: str, until: float, now: float, out: list[Effect]) -> None:
        answer, holds = self._answer, self._holds
        answer.leg_begins()
        number = self._attempts.begin(kind, pod, now, lender=holds.lease_pod if kind == "decode" else None)
        leg = next_leg(self._leg, answer, attempt=number, left_s=until - now, compat_hash=self._compat_hash)
        if kind == "decode":
            must_pull = self._policy != "recompute" and holds.must_ferry and not answer.begun
            leg = decode_leg(leg, answer, holds.handle, must_pull=must_pull, lost=self._losses.causes)
        out.append(OpenLeg(kind, pod, leg))

    # ---- frames ------------------------------------------------------------------------------------------------

    def _frames(self, event: LegFrames, now: float, out: list[Effect]) -> None:
        if self._attempts.is_open(event.attempt) and event.frames:
            self._attempts.heard(now)
        for frame in event.frames:
            if not self._attempts.is_open(event.attempt):
                return  # a leg that was given up, or has said all
            if self.state is State.PREFILLING:
                self._prefill_frame(frame, now, out)
            else:
                self._decode_frame(frame, now, out)

    def _prefill_frame(self, frame: Frame, now: float, out: list[Effect]) -> None:
        match frame:
            case Alive():
                pass
            case Prefilled():
                self._prefilled(frame, now, out)
            case Fail():
                self._fail_frame(frame, now, out)
            case _:
                self._leg_failed("protocol", now, out)

    def _prefilled(self, frame: Prefilled, now: float, out: list[Effect]) -> None:
        if not self._answer.prefilled(frame):
            self._leg_failed("protocol", now, out)
            return
        leg = self._attempts.the_open
        self._holds.leased(leg.number, leg.pod, frame.handle)
        self._attempts.finish(out)
        self._holds.release("prefill", out)
        self._open_decode(now, out)

    def _decode_frame(self, frame: Frame, now: float, out: list[Effect]) -> None:
        if self.state is State.ENDING:
            self._leg_failed("protocol", now, out)  # whatever follows `End`
            return
        if not isinstance(frame, Fail):
            self._losses.alive()
        match frame:
            case Alive():
                self._sent(self._answer.alive(out))
            case Begun():
                self._answer.prompt_is_there(frame.cached_tokens, frame.recomputed)
                self._attempts.the_open.ferried(frame.recomputed, out)
            case Tokens():
                self._tokens(frame, now, out)
            case End():
                self._end_frame(frame, now, out)
            case Fail():
                self._fail_frame(frame, now, out)
            case Handoff() if self._attempts.the_open.asked_to_move:
                self._handed_over(frame, now, out)
            case Prefilled() | Handoff():
                self._leg_failed("protocol", now, out)

    def _handed_over(self, frame: Handoff, now: float, out: list[Effect]) -> None:
        leg = self._attempts.the_open
        self._attempts.finish(out)
        self._losses.add("decode", leg.pod, "moved", taken=True, gained=leg.gained, now=now)
        self._holds.release("decode", out)
        self._holds.withdraw(out)  # of the prompt's own lease nothing is needed any more
        self._holds.leased(leg.number, leg.pod, frame.handle, moved=True)
        self._after_decode_failed("moved", now, out, lost=True)

    def _fail_frame(self, frame: Fail, now: float, out: list[Effect]) -> None:
        """The pod has ended the leg itself and told why."""
        if frame.kind == "invalid" and not self._answer.begun:
            self._attempts.finish(out)
            self._fail(failures.invalid(frame.message, frame.param), now, out)
            return
        if frame.kind == "transfer":
            self._answer.recompute = frame.param or "transfer"
            self._attempts.the_open.ferried(self._answer.recompute, out)
        self._leg_failed(leg_faults.FAILED_AS[frame.kind], now, out, ended=True)

    def _tokens(self, frame: Tokens, now: float, out: list[Effect]) -> None:
        answer = self._answer
        if not answer.acceptable(frame) or not answer.given.take(frame.choice, frame.ids, frame.chars):
            self._leg_failed("protocol", now, out)
            return
        if frame.ids:
            self._attempts.the_open.has_computed(out)
            self._attempts.the_open.gained = True
            self._losses.gained()
        self._sent(answer.tokens(frame, now, out))

    def _end_frame(self, frame: End, now: float, out: list[Effect]) -> None:
        if not self._answer.ends(frame, now, out):
            self._leg_failed("protocol", now, out)
            return
        self._attempts.the_open.has_computed(out)
        self.state, self._until = State.ENDING, now + self._limits.end_grace_s

    def _sent(self, sent: bool) -> None:
        if sent:
            self._attempts.the_open.sent = True
            self.state = State.STREAMING

    # ---- a leg's end -------------------------------------------------------------------------------------------

    def _closed(self, event: LegClosed, now: float, out: list[Effect]) -> None:
        if not self._attempts.is_open(event.attempt):
            return
        if event.cause == "invalid" and not self._answer.begun:
            self._attempts.finish(out)
            self._fail(failures.invalid(event.message, event.param), now, out)
        elif self.state is State.ENDING and event.cause != "garbage":
            self._finish(now, out)  # `End` came whole; how the stream closed behind it says nothing more
        else:
            ended, taken = event.cause in leg_faults.NEVER_TAKEN, event.cause != "refused"
            self._leg_failed(leg_faults.CLOSED_AS[event.cause], now, out, ended=ended, taken=taken)

    def _leg_failed(
        self, how: leg_faults.Fault, now: float, out: list[Effect], *, ended: bool = False, taken: bool = True
    ) -> None:
        """The open leg is given up: another pod, another way, or the end.

        Args:
            ended: its pod works on it no more.
            taken: its pod had begun it.
        """
        leg = self._attempts.the_open
        if ended:
            self._attempts.finish(out)
        else:
            self._attempts.abort(out)
        self._losses.add(leg.kind, leg.pod, how, taken=taken, gained=leg.gained, now=now)
        if how not in leg_faults.NO_FAULT_OF_THE_POD:
            out.append(PodFailed(leg.pod, leg.kind, how))
        self._holds.release(leg.kind, out)
        if leg.kind == "prefill":
            self._answer.recompute = leg_faults.recompute_reason(how)
            self._after_prefill_failed(how, now, out)
        elif how == "deadline":
            self._fail(failures.DEADLINE, now, out)
        elif how == "protocol" and leg.sent:
            self._give_up("protocol", failures.ENGINE_PROTOCOL, now, out)
        elif how == "transfer":
            self._after_transfer_failed(now, out)
        else:
            if how == "protocol":
                self._answer.rewind()
            if leg.gained:
                self._holds.withdraw(out)  # decode has read the KV, or has not: the next leg does without it
            self._after_decode_failed(how, now, out, lost=taken and (how in leg_faults.LOST or leg.gained))

    def _after_prefill_failed(self, how: leg_faults.Fault, now: float, out: list[Effect]) -> None:
        reason = self._losses.why_give_up(patient=True)
        most = 2 if self._policy == "recompute" else self._limits.prefill_attempts
        full = self._policy != "recompute" and self._losses.prefill_is_full
        if now >= self._deadline_at:
            self._fail(failures.DEADLINE, now, out)
        elif reason is not None:
            self._give_up(reason, leg_faults.LEG_FAILURES[how], now, out)
        elif not self._answer.begun and (self._prefill_legs < most or full):
            self._choose_prefill(out)
        else:
            self._without_prefill(now, out)

    def _after_transfer_failed(self, now: float, out: list[Effect]) -> None:
        """Decode could not get the prompt's KV and was not to compute it: another prefill pod, if there is one."""
        lender = self._holds.lease_pod
        self._holds.withdraw(out)
        if lender is not None:
            self._losses.add("prefill", lender, "transfer", taken=False, gained=False, now=now)
        self._holds.book("decode", self._decode_pod, out, computes=False)
        if self._policy == "fail":
            self._give_up("transfer", failures.TRANSFER_FAILED, now, out)
        elif self._prefill_legs >= self._limits.prefill_attempts:
            self._without_prefill(now, out)
        else:
            self._choose_prefill(out)

    def _after_decode_failed(self, how: leg_faults.Fault, now: float, out: list[Effect], *, lost: bool) -> None:
        """``lost``: the pod had the leg, and something of it."""
        if self._answer.leg_lost(how, lost=lost):
            self._losses.causes.append(how)
        reason: GaveUp | None = "memory" if not self._answer.given.kept else None
        reason = reason or self._losses.why_give_up(patient=self._patient())
        if reason is None:
            self._choose_decode(out)
        else:
            self._give_up(reason, leg_faults.LEG_FAILURES[how], now, out)

    def _patient(self) -> bool:
        """Whether there is an answer to be saved, so that it is worth while to wait for a pod."""
        return self._answer.begun or (self._answer.given.tokens > 0 and self._losses.error is not failures.BUSY)

    def _tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        stalls_at = self._attempts.stalls_at()
        if self.state is State.ENDING:
            if now >= self._until:
                self._finish(now, out)
        elif now >= self._deadline_at:
            self._fail(failures.DEADLINE, now, out)
        elif self.state in _WAITING:
            if now >= self._until:
                choose = self._choose_decode if self.state is State.WAITING_FOR_DECODE else self._choose_prefill
                choose(out)
        elif stalls_at is not None and now >= stalls_at:
            self._leg_failed("stalled", now, out)
        elif self.state is State.PREFILLING and now >= self._until:
            self._leg_failed("deadline", now, out)

    # ---- the one outcome ---------------------------------------------------------------------------------------

    def _gone(self, event: ClientGone, now: float, out: list[Effect]) -> None:
        self._stop(out)
        self._record("client_stalled" if event.stalled else "cancelled", now, out)

    def _stopped(self, event: Stopping, now: float, out: list[Effect]) -> None:
        self._fail(failures.STOPPING, now, out)

    def _stopped_at_end(self, event: Stopping, now: float, out: list[Effect]) -> None:
        self._finish(now, out)  # `End` came whole, as when the stream behind it breaks off

    def _finish(self, now: float, out: list[Effect]) -> None:
        self._attempts.finish(out)
        self._holds.release("decode", out)
        if self._answer.end is not None and self._answer.end.recomputed:
            self._holds.withdraw(out)  # a handle that was refused unread was given up to nobody
        self._holds.read()
        self._answer.finish(out)
        self._record("ok", now, out)

    def _give_up(self, reason: GaveUp, failure: Failure, now: float, out: list[Effect]) -> None:
        """No further pod is tried."""
        self._fail(failures.BARREN if reason == "barren" else failure, now, out, gave_up=reason)

    def _fail(self, failure: Failure, now: float, out: list[Effect], gave_up: GaveUp | None = None) -> None:
        self._stop(out)
        self._answer.fail(failure, out)
        self._record(failure.outcome, now, out, gave_up=gave_up)

    def _stop(self, out: list[Effect]) -> None:
        """Leave nothing behind at any pod."""
        self._attempts.abort(out)
        self._holds.give_back(out)

    def _record(self, outcome: Outcome, now: float, out: list[Effect], gave_up: GaveUp | None = None) -> None:
        self.state = State.DONE
        pods = (self._prefill_pod, self._decode_pod or None)
        legs, resumed = self._attempts.opened, tuple(self._losses.causes)
        out.append(self._answer.record(outcome, now, pods=pods, legs=legs, resumed=resumed, gave_up=gave_up))

    def _ignore(self, event: Event, now: float, out: list[Effect]) -> None:
        """Late news of a leg or a client that no longer matters."""
