"""One request's way through the pods: prefill, decode, and what happens when either fails.

Pure: ``handle`` takes an event and the time and returns effects; it reads no clock and opens no socket. The table
``TRANSITIONS`` names the method for each state and event, so each pair is decided in one place.

Rules:

- A leg's frames count whole or not at all. A leg that sends no frame for the stall timeout is dead.
- A prefill leg that fails for whatever reason is tried once on another pod; after that decode does the whole job.
- A decode leg that fails before the client has a byte is tried on another pod. The ids recorded so far are input of
  the next leg and never picked again.
- Once the client has bytes, a failure is an error event and a cut stream, never ``[DONE]``.
- ``End`` is passed on when the leg's stream is over (or ``Limits.end_grace_s`` later), and only if nothing follows it.
- A router that stops fails its answers as a pod's loss would, except one whose `End` is here.
- Attempt numbers count all legs of a request, so that prefill and decode on one pod never share an abort's tombstone.
- A leg whose pod said that it failed, or refused it, is over there and is not aborted.
- A handle that was received and led to no answer is withdrawn: the prefill leg is aborted by name after its end.
"""

import enum
from collections.abc import Callable

import msgspec

from kvferry_router import failures
from kvferry_router.flow_messages import (
    AbortLeg,
    Book,
    ClientGone,
    Computed,
    Effect,
    Event,
    FailAnswer,
    Failure,
    FinishAnswer,
    FinishLeg,
    Kind,
    LegClosed,
    LegFrames,
    NeedPod,
    OpenLeg,
    Outcome,
    Path,
    PodChosen,
    PodFailed,
    Record,
    Release,
    Send,
    Start,
    Stopping,
    Tick,
)
from kvferry_router.leg_faults import (
    CLOSED_AS,
    DECODE_FAILURES,
    FAILED_AS,
    NEVER_TAKEN,
    NO_FAULT_OF_THE_POD,
    Fault,
    recompute_reason,
)
from kvferry_wire.frames import Alive, End, Fail, Frame, Handoff, Prefilled, Tokens
from kvferry_wire.leg import ChoiceState, Leg
from kvferry_wire.limits import Limits


class State(enum.Enum):
    NEW = "new"
    PREFILLING = "prefilling"
    CHOOSING_PREFILL = "choosing_prefill"
    CHOOSING_DECODE = "choosing_decode"
    DECODING = "decoding"  # the client has no byte yet
    STREAMING = "streaming"  # the client has bytes
    ENDING = "ending"  # `End` is here; waiting for the leg's stream to close behind it
    DONE = "done"


class IllegalEventError(RuntimeError):
    """An event that cannot happen in this state; nothing was changed."""

    def __init__(self, state: State, event: object) -> None:
        super().__init__(f"{type(event).__name__} in state {state.value}")


class RequestFlow:
    """The state of one request.

    Args:
        leg: the request as its first leg; ``attempt``, ``deadline_ms``, ``handle`` and ``recompute`` are set per leg.
        limits: deadlines and caps.
        deadline_s: seconds from ``accepted_at`` to the end of the answer.
        accepted_at: the time, on the clock of all later events.
    """

    def __init__(self, leg: Leg, limits: Limits, *, deadline_s: float, accepted_at: float) -> None:
        self.state = State.NEW
        self._leg = leg
        self._limits = limits
        self._accepted_at = accepted_at
        self._deadline_at = accepted_at + deadline_s
        self._prefill_share_s = deadline_s * limits.prefill_share

        self._emitted: list[list[int]] = [list(choice.emitted) for choice in leg.choices]
        self._chars: list[int] = [choice.chars_sent for choice in leg.choices]
        self._cached_tokens = 0
        self._recompute = ""
        self._end: End | None = None

        self._attempts = 0  # legs opened so far; the open one is number attempts - 1
        self._decode_legs = 0
        self._open: tuple[Kind, str] | None = None
        self._last_frame_at = 0.0
        self._phase_until = 0.0  # of a prefill leg: its share of the deadline; when ending: the grace

        self._decode_choice = ""
        self._path: Path = "aggregated"
        self._booked: dict[Kind, str] = {}
        self._failed: dict[Kind, set[str]] = {"prefill": set(), "decode": set()}
        self._prefill_retried = False
        self._lease: tuple[int, str] | None = None  # the prefill leg whose handle we hold: attempt, pod
        self._decode_error: Failure = failures.NO_CAPACITY

        self._prefill_pod: str | None = None
        self._decode_pod: str | None = None
        self._first_token_at: float | None = None
        self._sent = False
        self._held = b""  # a role chunk that waits for the first text, so that until then another pod can begin anew

    def __repr__(self) -> str:
        tokens = sum(map(len, self._emitted))
        return f"RequestFlow({self._leg.internal_id}, {self.state.value}, open={self._open}, tokens={tokens})"

    # ---- the outside -------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order.

        Raises:
            IllegalEventError: the event cannot happen in this state (the caller's bug).
        """
        method = TRANSITIONS[self.state, type(event)]
        if method is None:
            raise IllegalEventError(self.state, event)
        effects: list[Effect] = []
        method(self, event, now, effects)
        return effects

    def next_wakeup(self) -> float | None:
        """When a ``Tick`` is due; ``None`` when none is."""
        if self.state is State.DONE:
            return None
        times = [self._deadline_at]
        if self._open is not None and self.state is not State.ENDING:
            times.append(self._last_frame_at + self._limits.stall_timeout_s)
        if self.state in (State.PREFILLING, State.ENDING):
            times.append(self._phase_until)
        return min(times)

    def choices(self) -> tuple[ChoiceState, ...]:
        """What each choice has given so far: all that another pod needs to go on."""
        return tuple(
            ChoiceState(emitted=tuple(ids), chars_sent=chars)
            for ids, chars in zip(self._emitted, self._chars, strict=True)
        )

    def booked(self) -> dict[Kind, str]:
        """Bookings that were not released yet."""
        return dict(self._booked)

    def lease_pod(self) -> str | None:
        """The prefill pod whose handle the next decode leg will carry."""
        return None if self._lease is None else self._lease[1]

    @property
    def stream(self) -> bool:
        return self._leg.format.stream

    # ---- start and choice of pods ------------------------------------------------------------------------------

    def _start(self, event: Start, now: float, out: list[Effect]) -> None:
        if now >= self._deadline_at:  # it waited its time away
            self._fail(failures.DEADLINE, now, out)
            return
        self._decode_choice = event.decode
        self._book("decode", event.decode, out, computes=event.prefill is None)
        if event.prefill is None:
            self._open_decode(now, out)
        else:
            self._path = "disaggregated"
            self._book("prefill", event.prefill, out)
            self._open_prefill(event.prefill, now, out)

    def _prefill_chosen(self, event: PodChosen, now: float, out: list[Effect]) -> None:
        self._expect_kind("prefill", event)
        if event.pod is None:
            self._decode_alone(now, out)
            return
        self._book("prefill", event.pod, out)
        self._open_prefill(event.pod, now, out)

    def _decode_chosen(self, event: PodChosen, now: float, out: list[Effect]) -> None:
        self._expect_kind("decode", event)
        if event.pod is None:
            self._fail(self._decode_error, now, out)
            return
        self._decode_choice = event.pod
        self._book("decode", event.pod, out, computes=self._leg.handle is None)
        self._open_decode(now, out)

    def _expect_kind(self, kind: Kind, event: PodChosen) -> None:
        if event.kind != kind:
            raise IllegalEventError(self.state, event)

    def _open_prefill(self, pod: str, now: float, out: list[Effect]) -> None:
        self.state = State.PREFILLING
        self._prefill_pod = pod
        self._phase_until = min(self._deadline_at, now + self._prefill_share_s)
        self._open_leg("prefill", pod, self._phase_until, now, out)

    def _open_decode(self, now: float, out: list[Effect]) -> None:
        self.state = State.DECODING
        self._decode_pod = self._decode_choice
        self._decode_legs += 1
        self._open_leg("decode", self._decode_choice, self._deadline_at, now, out)

    def _decode_alone(self, now: float, out: list[Effect]) -> None:
        """No prefill pod did it: decode computes the prompt as well, and is booked for it."""
        self._release("decode", out)
        self._book("decode", self._decode_choice, out)
        self._open_decode(now, out)

    def _open_leg(self, kind: Kind, pod: str, until: float, now: float, out: list[Effect]) -> None:
        leg = msgspec.structs.replace(
            self._leg,
            attempt=self._attempts,
            deadline_ms=max(1, int(1000 * (until - now))),
            choices=self.choices(),
            cached_tokens=self._cached_tokens,
            recompute=self._recompute if kind == "decode" else "",
            handle=self._leg.handle if kind == "decode" else None,
        )
        self._attempts += 1
        self._leg = msgspec.structs.replace(self._leg, choices=leg.choices)
        self._open = (kind, pod)
        self._last_frame_at = now
        out.append(OpenLeg(kind, pod, leg))

    # ---- frames ------------------------------------------------------------------------------------------------

    def _frames(self, event: LegFrames, now: float, out: list[Effect]) -> None:
        if self._is_open(event.attempt) and event.frames:
            self._last_frame_at = now
        for frame in event.frames:
            if not self._is_open(event.attempt):
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
                if len(frame.first) != len(self._emitted):
                    self._leg_failed("protocol", now, out)
                    return
                self._prefilled(frame, now, out)
            case Fail():
                self._fail_frame(frame, now, out)
            case _:
                self._leg_failed("protocol", now, out)

    def _prefilled(self, frame: Prefilled, now: float, out: list[Effect]) -> None:
        assert self._open is not None
        attempt, (_, pod) = self._attempts - 1, self._open
        for ids, first in zip(self._emitted, frame.first, strict=True):
            ids.append(first)
        self._cached_tokens = frame.cached_tokens
        self._leg = msgspec.structs.replace(self._leg, handle=frame.handle)
        if frame.handle is not None:
            self._lease = (attempt, pod)
        self._open = None
        out.append(FinishLeg(attempt))
        self._release("prefill", out)
        self._open_decode(now, out)

    def _decode_frame(self, frame: Frame, now: float, out: list[Effect]) -> None:
        if self.state is State.ENDING:
            self._leg_failed("protocol", now, out)  # whatever follows `End`
            return
        match frame:
            case Alive():
                self._send(self._held, 0, out)  # a second has passed: the client may know that its answer has begun
            case Tokens():
                self._tokens(frame, now, out)
            case End():
                self._end_frame(frame, now, out)
            case Fail():
                self._fail_frame(frame, now, out)
            case Prefilled() | Handoff():
                self._leg_failed("protocol", now, out)

    def _fail_frame(self, frame: Fail, now: float, out: list[Effect]) -> None:
        """The pod has ended the leg itself and told why."""
        if frame.kind == "invalid":
            self._finish_open(out)
            self._fail(failures.invalid(frame.message, frame.param), now, out)
        else:
            self._leg_failed(FAILED_AS[frame.kind], now, out, ended=True)

    def _tokens(self, frame: Tokens, now: float, out: list[Effect]) -> None:
        if not 0 <= frame.choice < len(self._emitted) or (frame.data and not self.stream):
            self._leg_failed("protocol", now, out)
            return
        if len(self._emitted[frame.choice]) + len(frame.ids) > self._leg.sampling.max_tokens:
            self._leg_failed("protocol", now, out)
            return
        self._emitted[frame.choice] += frame.ids
        self._chars[frame.choice] += frame.chars
        if not self._sent and not frame.ids and not frame.chars:
            self._held += frame.data
            return
        self._first_token(now, out)
        self._send(self._held + frame.data, len(frame.ids), out)

    def _send(self, data: bytes, tokens: int, out: list[Effect]) -> None:
        if data:
            self._held = b""
            self._sent = True
            self.state = State.STREAMING
            out.append(Send(data, self._planned_path(), tokens))

    def _first_token(self, now: float, out: list[Effect]) -> None:
        if self._first_token_at is None:
            self._first_token_at = now
            out.append(Computed("decode", self._decode_choice))

    def _end_frame(self, frame: End, now: float, out: list[Effect]) -> None:
        # An end that counts other tokens than came is that of a cut or of another answer.
        if len(frame.finish) != len(self._emitted) or frame.completion_tokens != sum(map(len, self._emitted)):
            self._leg_failed("protocol", now, out)
            return
        self._first_token(now, out)
        self._end = frame
        self._phase_until = now + self._limits.end_grace_s
        self.state = State.ENDING

    # ---- a leg's end -------------------------------------------------------------------------------------------

    def _closed(self, event: LegClosed, now: float, out: list[Effect]) -> None:
        if not self._is_open(event.attempt):
            return
        if event.cause == "invalid":
            self._finish_open(out)
            self._fail(failures.invalid(event.message, event.param), now, out)
        elif self.state is State.ENDING and event.cause != "garbage":
            self._finish(now, out)  # `End` came whole; how the stream closed behind it says nothing more
        else:
            self._leg_failed(CLOSED_AS[event.cause], now, out, ended=event.cause in NEVER_TAKEN)

    def _leg_failed(self, how: Fault, now: float, out: list[Effect], *, ended: bool = False) -> None:
        """The open leg is given up: another pod, another way, or the end. ``ended``: its pod works on it no more."""
        assert self._open is not None
        kind, pod = self._open
        if ended:
            self._finish_open(out)
        else:
            self._abort_open(out)
        self._failed[kind].add(pod)
        if how not in NO_FAULT_OF_THE_POD:
            out.append(PodFailed(pod, kind, how))
        self._release(kind, out)
        if kind == "prefill":
            self._after_prefill_failed(how, now, out)
        else:
            self._after_decode_failed(how, now, out)

    def _after_prefill_failed(self, how: Fault, now: float, out: list[Effect]) -> None:
        self._recompute = recompute_reason(how)
        if now >= self._deadline_at:
            self._fail(failures.DEADLINE, now, out)
        elif self._prefill_retried:
            self._decode_alone(now, out)
        else:
            self._prefill_retried = True
            self.state = State.CHOOSING_PREFILL
            # The decode pod is never its own prefill pod.
            out.append(NeedPod("prefill", frozenset(self._failed["prefill"] | {self._decode_choice})))

    def _after_decode_failed(self, how: Fault, now: float, out: list[Effect]) -> None:
        error = DECODE_FAILURES[how]
        again = how != "deadline" and not self._sent and self._decode_legs < self._limits.decode_attempts
        if not again:
            self._fail(error, now, out)
            return
        # The last reason is told, but a full service is told as such.
        if self._decode_legs == 1 or error is failures.BUSY:
            self._decode_error = error
        self._end = None
        self._held = b""
        if how == "protocol":
            # What such a pod said is worth nothing, and the client has none of it: back to where its leg began.
            self._emitted = [list(choice.emitted) for choice in self._leg.choices]
            self._chars = [choice.chars_sent for choice in self._leg.choices]
        self.state = State.CHOOSING_DECODE
        out.append(NeedPod("decode", frozenset(self._failed["decode"])))

    def _tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        if self.state is State.ENDING and now >= self._phase_until:
            self._finish(now, out)
        elif now >= self._deadline_at:
            self._fail(failures.DEADLINE, now, out)
        elif self._open is None or self.state is State.ENDING:
            pass
        elif now >= self._last_frame_at + self._limits.stall_timeout_s:
            self._leg_failed("stalled", now, out)
        elif self.state is State.PREFILLING and now >= self._phase_until:
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
        assert self._end is not None
        self._finish_open(out)
        self._release("decode", out)
        if self._lease is not None and self._end.recomputed:
            out.append(AbortLeg(*self._lease))  # a handle that was refused unread was given up to nobody
        self._lease = None  # decode has read it
        path = self._planned_path() if self.stream else self._final_path()
        out.append(FinishAnswer(self._held + self._end.data, path, self.stream))
        self._record("ok", now, out)

    def _fail(self, failure: Failure, now: float, out: list[Effect]) -> None:
        self._stop(out)
        out.append(FailAnswer(failure, in_band=self._sent))
        self._record(failure.outcome, now, out)

    def _stop(self, out: list[Effect]) -> None:
        """Leave nothing behind at any pod."""
        self._abort_open(out)
        if self._lease is not None:
            attempt, pod = self._lease
            self._lease = None
            out.append(AbortLeg(attempt, pod))
        for kind in tuple(self._booked):
            self._release(kind, out)

    def _record(self, outcome: Outcome, now: float, out: list[Effect]) -> None:
        self.state = State.DONE
        end = self._end if outcome == "ok" else None
        out.append(
            Record(
                outcome=outcome,
                path=self._final_path(),
                prefill_pod=self._prefill_pod,
                decode_pod=self._decode_pod,
                prompt_tokens=len(self._leg.prompt_ids),
                completion_tokens=sum(map(len, self._emitted)) if end is None else end.completion_tokens,
                cached_tokens=self._cached_tokens if end is None else end.cached_tokens,
                recomputed=self._recomputed(),
                accepted_at=self._accepted_at,
                first_token_at=self._first_token_at,
                ended_at=now,
                legs=self._attempts,
            )
        )

    # ---- small parts -------------------------------------------------------------------------------------------

    def _ignore(self, event: Event, now: float, out: list[Effect]) -> None:
        """Late news of a leg or a client that no longer matters."""

    def _is_open(self, attempt: int) -> bool:
        return self._open is not None and attempt == self._attempts - 1

    def _abort_open(self, out: list[Effect]) -> None:
        if self._open is not None:
            out.append(AbortLeg(self._attempts - 1, self._open[1]))
            self._open = None

    def _finish_open(self, out: list[Effect]) -> None:
        if self._open is not None:
            out.append(FinishLeg(self._attempts - 1))
            self._open = None

    def _book(self, kind: Kind, pod: str, out: list[Effect], *, computes: bool = True) -> None:
        assert kind not in self._booked
        self._booked[kind] = pod
        out.append(Book(kind, pod, computes))

    def _release(self, kind: Kind, out: list[Effect]) -> None:
        pod = self._booked.pop(kind, None)
        if pod is not None:
            out.append(Release(kind, pod))

    def _planned_path(self) -> Path:
        return "aggregated" if self._recompute else self._path

    def _recomputed(self) -> str:
        return self._recompute or (self._end.recomputed if self._end is not None else "")

    def _final_path(self) -> Path:
        return "recomputed" if self._recomputed() else self._path


# Takes the flow, the one kind of event of its column, the time and the effects so far.
_Method = Callable[..., None]


def _table() -> dict[tuple[State, type[Event]], _Method | None]:
    """Each state and event: the method that handles it; ``None`` where it cannot happen."""
    flow = RequestFlow
    events = (Start, PodChosen, LegFrames, LegClosed, ClientGone, Stopping, Tick)
    rows: dict[State, tuple[_Method | None, ...]] = {
        State.NEW: (flow._start, None, None, None, flow._gone, flow._stopped, flow._tick),
        State.PREFILLING: (None, None, flow._frames, flow._closed, flow._gone, flow._stopped, flow._tick),
        State.CHOOSING_PREFILL: (
            None,
            flow._prefill_chosen,
            flow._ignore,
            flow._ignore,
            flow._gone,
            flow._stopped,
            flow._tick,
        ),
        State.CHOOSING_DECODE: (
            None,
            flow._decode_chosen,
            flow._ignore,
            flow._ignore,
            flow._gone,
            flow._stopped,
            flow._tick,
        ),
        State.DECODING: (None, None, flow._frames, flow._closed, flow._gone, flow._stopped, flow._tick),
        State.STREAMING: (None, None, flow._frames, flow._closed, flow._gone, flow._stopped, flow._tick),
        State.ENDING: (None, None, flow._frames, flow._closed, flow._gone, flow._stopped_at_end, flow._tick),
        State.DONE: (None, flow._ignore, flow._ignore, flow._ignore, flow._ignore, flow._ignore, flow._ignore),
    }
    return {(state, event): method for state, row in rows.items() for event, method in zip(events, row, strict=True)}


TRANSITIONS = _table()
