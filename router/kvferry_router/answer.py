"""One answer as far as it has come: what the pods have given of it, what its client has, and how it ends. Pure."""

from kvferry_router.flow_messages import (
    Effect,
    FailAnswer,
    Failure,
    FinishAnswer,
    GaveUp,
    Outcome,
    Path,
    Record,
    Resumed,
    Send,
)
from kvferry_router.given import Given
from kvferry_router.leg_faults import Fault
from kvferry_wire.frames import End, Prefilled, Tokens
from kvferry_wire.leg import Leg


class Answer:
    """The frames of legs go in, bytes for the client come out.

    Attributes:
        begun: decode has given something of it, or the client has bytes.
        sent: the client has bytes.
        end: the leg's `End`, once it is here.
        recompute: why prefill's work is not there, as far as the router knows.
        interrupted: how the leg was lost that the next one goes on from.
    """

    def __init__(self, leg: Leg, given: Given, accepted_at: float) -> None:
        self._stream = leg.format.stream
        self._max_tokens = leg.sampling.max_tokens
        self._prompt_tokens = len(leg.prompt_ids)
        self._accepted_at = accepted_at
        self.given = given
        self.path: Path = "aggregated"  # as planned
        self.recompute = ""
        self.cached_tokens = 0
        self.begun = False
        self.sent = False
        self.end: End | None = None
        self.interrupted: Fault | None = None
        self._recomputed = ""  # as decode says it
        self._held = b""  # a role chunk that waits for the first text, so that until then another pod can begin anew
        self._first_token_at: float | None = None
        self._given_at = accepted_at  # when something of the answer came last
        self._begun_before_leg = False

    # ---- legs --------------------------------------------------------------------------------------------------

    def leg_begins(self) -> None:
        self.given.mark()
        self._begun_before_leg = self.begun

    def leg_lost(self, how: Fault, *, lost: bool) -> bool:
        """Another leg is to go on. ``lost``: the pod had something of it. Returns whether that is an interruption."""
        self.end = None
        self._held = b""
        if not (self.begun and lost):
            return False
        self.interrupted = how
        return True

    def rewind(self) -> None:
        """What came of the present leg is not believed. The client must have none of it."""
        self.given.rewind()
        self.begun = self._begun_before_leg

    # ---- frames ------------------------------------------------------------------------------------------------

    def prefilled(self, frame: Prefilled) -> bool:
        """Take prefill's tokens; false when they cannot be any of this answer."""
        again = self.given.tokens > 0
        if not self.given.first(frame.first):
            return False
        if not again:
            self.cached_tokens = frame.cached_tokens
        self.recompute = ""  # of an earlier prefill leg; the KV is there now
        return True

    def prompt_is_there(self, cached_tokens: int, recomputed: str) -> None:
        """The answer's usage is that of the leg that began it."""
        if not self.given.tokens:
            self.cached_tokens = cached_tokens
        if not self.begun:
            self._recomputed = recomputed

    def alive(self, out: list[Effect]) -> bool:
        """A second has passed: the client may know that its answer has begun. Returns whether bytes were sent."""
        return self._send(self._held, 0, out)

    def acceptable(self, frame: Tokens) -> bool:
        """Whether the frame can be one of this answer."""
        if not 0 <= frame.choice < len(self.given) or (frame.data and not self._stream):
            return False
        return self.given.count(frame.choice) + len(frame.ids) <= self._max_tokens

    def tokens(self, frame: Tokens, now: float, out: list[Effect]) -> bool:
        """Take acceptable ids that were counted; returns whether bytes were sent."""
        if not self.sent and not frame.ids and not frame.chars:
            self._held += frame.data
            return False
        self._comes(now, out, picked=bool(frame.ids))
        return self._send(self._held + frame.data, len(frame.ids), out)

    def ends(self, frame: End, now: float, out: list[Effect]) -> bool:
        """Take the end; false when it counts other tokens than came, as that of a cut or of another answer does."""
        if len(frame.finish) != len(self.given) or frame.completion_tokens != self.given.tokens:
            return False
        self.end = frame
        self._comes(now, out, picked=True)
        return True

    def _comes(self, now: float, out: list[Effect], *, picked: bool) -> None:
        """Something of the answer came; ``picked``: by the present leg."""
        if self._first_token_at is None:
            self._first_token_at = now
        if self.interrupted is not None and picked:
            out.append(Resumed(self.interrupted, now - self._given_at))
            self.interrupted = None
        self.begun = True
        self._given_at = now

    def _send(self, data: bytes, tokens: int, out: list[Effect]) -> bool:
        if not data:
            return False
        self._held = b""
        self.begun = self.sent = True
        out.append(Send(data, self.planned_path(), tokens))
        return True

    # ---- ends --------------------------------------------------------------------------------------------------

    def finish(self, out: list[Effect]) -> None:
        """The right end."""
        assert self.end is not None
        path = self.planned_path() if self._stream else self._final_path()
        out.append(FinishAnswer(self._held + self.end.data, path, self._stream))

    def fail(self, failure: Failure, out: list[Effect]) -> None:
        out.append(FailAnswer(failure, in_band=self.sent))

    def record(
        self,
        outcome: Outcome,
        now: float,
        *,
        pods: tuple[str | None, str | None],
        legs: int,
        resumed: tuple[str, ...],
        gave_up: GaveUp | None,
    ) -> Record:
        """The one outcome. ``pods``: the last prefill pod and the last decode pod."""
        end = self.end if outcome == "ok" else None
        self.given.release()
        return Record(
            outcome=outcome,
            path=self._final_path(),
            prefill_pod=pods[0],
            decode_pod=pods[1],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.given.tokens if end is None else end.completion_tokens,
            cached_tokens=self.cached_tokens if end is None else end.cached_tokens,
            recomputed=self._why_recomputed(),
            accepted_at=self._accepted_at,
            first_token_at=self._first_token_at,
            ended_at=now,
            legs=legs,
            resumed=resumed,
            gave_up=gave_up,
        )

    def planned_path(self) -> Path:
        return "aggregated" if self.recompute else self.path

    def _why_recomputed(self) -> str:
        return self.recompute or (self.end.recomputed if self.end is not None else self._recomputed)

    def _final_path(self) -> Path:
        return "recomputed" if self._why_recomputed() else self.path
