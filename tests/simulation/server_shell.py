"""The API server of a pod, as far as legs go: leg -> Submit, outputs -> frames, closed connections -> aborts."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry_runtime.core.messages import (
    AbortLeg,
    EngineOutput,
    FailOut,
    HandedOver,
    HandOver,
    LeaseSettled,
    LegKey,
    PrefilledOut,
    StopChoice,
    Submit,
    TokensOut,
)
from kvferry_runtime.server import leg_check
from kvferry_wire.frames import Alive, Begun, End, Fail, FailKind, Frame, Handoff, Prefilled, Tokens
from kvferry_wire.leg import Leg
from tests.simulation.answers import Ending, cut_at_stop, event, held_back, text_of
from tests.simulation.links import Stream
from tests.simulation.models import SPEC
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.pod import Pod


@dataclass
class Writer:
    """What one choice of a leg has said."""

    ids: list[int]
    shown: int  # characters that the client has
    finish: str | None = None
    stop_told: bool = False


@dataclass(eq=False)
class ServedLeg:
    """A leg that the server works on."""

    key: LegKey
    kind: str
    leg: Leg
    stream: Stream
    writers: list[Writer] = field(default_factory=list)
    cached: int = 0
    recomputed: str = ""
    begun: bool = False


class ServerShell:
    """All legs of one pod's incarnation."""

    def __init__(self, pod: "Pod") -> None:
        self._pod = pod
        self._process = pod.process
        self._by_stream: dict[Stream, ServedLeg] = {}
        self.legs: dict[LegKey, ServedLeg] = {}
        self._ticks = 0
        self._handed_over: set[LegKey] = set()
        self.attached: dict[Stream, tuple[LegKey, int]] = {}  # streams behind an answer, and the lease that it names

    # ---- a leg arrives

    def on_message(self, stream: Stream, message: tuple[str, Leg]) -> None:
        kind, leg = message
        key = LegKey(leg.internal_id, leg.attempt)
        served = ServedLeg(key, kind, leg, stream)
        if key in self.legs:
            self._send(served, Fail(kind="invalid", message="the leg is being served"))
            stream.close(1)
            return
        self.legs[key] = served
        self._by_stream[stream] = served
        if leg.compat_hash not in ("", self._pod.compat_hash):
            self._send(served, Fail(kind="draining", message="another model"))
            self._over(served)
            return
        fault = leg_check.context_fault(leg, self._pod.config.max_model_len) if kind == "decode" else None
        if fault is not None:
            self._pod.world.count("legs_without_room")
            self._send(served, fault)
            self._over(served)
            return
        self._pod.fabric.leg_comes(self._pod, leg)
        if kind == "prefill":
            self._pod.fabric.reached(key.internal_id, "prefill")
        submit = Submit(
            key=key,
            kind="prefill" if kind == "prefill" else "generate",
            prompt_ids=leg.prompt_ids,
            emitted=tuple([choice.emitted for choice in leg.choices]),
            sampling=leg.sampling,
            extras=leg.extras,
            deadline_s=leg.deadline_ms / 1000,
            eos_token_ids=(SPEC.eos_token_id,),
            handle=leg.handle,
            must_pull=leg.must_pull,
            recompute=leg.recompute,
        )
        self._pod.post_later(submit)
        served.cached = leg.cached_tokens
        if kind == "decode":
            served.writers = [Writer(list(choice.emitted), choice.chars_sent) for choice in leg.choices]
            for index in range(len(served.writers)):
                self._write(served, index, ())
            self._end_if_done(served)

    # ---- what the engine says

    def on_outputs(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output, LeaseSettled):
                self._detach(output.key)
                continue
            served = self.legs.get(output.key)
            if output.key in self._handed_over:
                raise Violation("after_handoff", f"{output!r}", output.key.internal_id)
            if isinstance(output, HandedOver):
                self._handed_over.add(output.key)
            if served is None:
                if isinstance(output, (PrefilledOut, HandedOver)) and output.handle is not None:
                    self._pod.owner.answered(output.handle.lease_id, delivered=False)
                continue
            match output:
                case TokensOut():
                    self._on_tokens(served, output)
                case PrefilledOut():
                    self._on_prefilled(served, output)
                case HandedOver(handle=handle):
                    assert handle is not None
                    self._process.world.count("legs_moved")
                    self._send(served, Handoff(handle=handle))
                    self._answered(served, handle.lease_id)
                case FailOut():
                    if output.kind == "cancelled":
                        self._process.world.count("legs_stopped_by_a_tombstone")
                    self._send(served, Fail(kind=output.kind, message=output.message, param=output.reason or None))
                    self._over(served)

    def _on_tokens(self, served: ServedLeg, output: TokensOut) -> None:
        writer = served.writers[output.choice]
        if writer.finish is not None:
            return  # a stop string ended it before
        served.recomputed = served.recomputed or output.recomputed
        if not any(choice.emitted for choice in served.leg.choices):
            served.cached = output.cached_tokens or served.cached
        if output.ids and not served.begun:
            served.begun = True
            self._pod.fabric.told_cached(served.leg, served.cached)
            self._send(served, Begun(cached_tokens=served.cached, recomputed=served.recomputed))
            if not served.leg.format.stream:
                self._pod.fabric.reached(served.key.internal_id, "non_stream")
        writer.ids += output.ids
        writer.finish = output.finish
        self._write(served, output.choice, output.ids)
        self._end_if_done(served)

    def _write(self, served: ServedLeg, choice: int, ids: tuple[int, ...]) -> None:
        """Send new ids, and the text that they let go."""
        writer, sampling = served.writers[choice], served.leg.sampling
        text, stopped = cut_at_stop(text_of(writer.ids, sampling), sampling.stop)
        if stopped and not writer.stop_told:
            writer.finish = "stop"
            writer.stop_told = True
            self._pod.post_later(StopChoice(key=served.key, choice=choice))
        upto = len(text)
        if writer.finish is None:
            upto -= held_back(text, sampling.stop)
        fresh = text[writer.shown : upto]
        if served.leg.format.stream and fresh:
            frame = Tokens(choice=choice, ids=ids, data=event(choice, writer.shown, fresh), chars=len(fresh))
            writer.shown += len(fresh)
            self._send(served, frame)
        elif ids:
            self._send(served, Tokens(choice=choice, ids=ids, data=b""))

    def _end_if_done(self, served: ServedLeg) -> None:
        if all(writer.finish is not None for writer in served.writers):
            self._end(served)

    def _end(self, served: ServedLeg) -> None:
        sampling, leg, data = served.leg.sampling, served.leg, b""
        finish = tuple([writer.finish or "" for writer in served.writers])
        if not leg.format.stream:
            texts = [cut_at_stop(text_of(writer.ids, sampling), sampling.stop)[0] for writer in served.writers]
            data = b"".join([event(choice, 0, text) for choice, text in enumerate(texts)])
        count = sum(len(writer.ids) for writer in served.writers)
        ending = Ending(finish, len(leg.prompt_ids), count, served.cached, leg.resumed)
        self._send(
            served,
            End(
                data=data + ending.encode(),
                finish=finish,
                completion_tokens=count,
                cached_tokens=served.cached,
                recomputed=served.recomputed,
            ),
        )
        self._over(served)

    def _on_prefilled(self, served: ServedLeg, output: PrefilledOut) -> None:
        self._pod.fabric.told_cached(served.leg, output.cached_tokens)
        self._pod.fabric.reached(served.key.internal_id, "reply")
        self._send(served, Prefilled(first=output.first, cached_tokens=output.cached_tokens, handle=output.handle))
        if output.handle is None:
            self._over(served)
        else:
            self._answered(served, output.handle.lease_id)

    # ---- a leg ends

    def _answered(self, served: ServedLeg, lease_id: int) -> None:
        """The answer names a lease; that of an attached leg goes with its stream, until a reader takes it up."""
        self._pod.owner.answered(lease_id, delivered=True)
        if not served.leg.attached:
            self._over(served)
            return
        self.legs.pop(served.key, None)
        self._by_stream.pop(served.stream, None)
        self.attached[served.stream] = (served.key, lease_id)

    def _detach(self, key: LegKey) -> None:
        """The lease that the leg left needs the stream no more: it was taken up, or is over."""
        for stream in [stream for stream, (other, _) in self.attached.items() if other == key]:
            del self.attached[stream]
            stream.close(1)
            self._pod.fabric.forget(stream)

    def _over(self, served: ServedLeg) -> None:
        """The engine has said its last word on it."""
        served.stream.close(1)
        self._forget(served)

    def _forget(self, served: ServedLeg) -> None:
        self.legs.pop(served.key, None)
        self._by_stream.pop(served.stream, None)
        self._pod.fabric.forget(served.stream)

    def on_close(self, stream: Stream) -> None:
        """The router wants no more of a leg."""
        served = self._by_stream.get(stream)
        self._pod.fabric.forget(stream)
        if stream in self.attached:
            key, lease_id = self.attached.pop(stream)
            self._process.log(key.internal_id, f"lease {lease_id} goes with its connection")
            self._process.world.count("leases_gone_with_their_connection")
            self._pod.owner.answered(lease_id, delivered=False)
        if served is not None:
            self._process.log(served.key.internal_id, f"leg {served.key.attempt} is closed by the router")
            self._forget(served)
            self._pod.post_later(AbortLeg(key=served.key))

    def on_cut(self, stream: Stream) -> None:
        self.on_close(stream)

    def on_abort(self, internal_id: str, attempt: int) -> None:
        """Abort by name: also what has not arrived yet; the engine's loop withdraws a lease whose leg has ended."""
        key = LegKey(internal_id, attempt)
        self._process.log(internal_id, f"leg {attempt} is aborted by name")
        served = self.legs.get(key)
        if served is not None:
            self._send(served, Fail(kind="cancelled", message="the request was cancelled"))
            self._over(served)
        self._detach(key)
        self._pod.post_later(AbortLeg(key=key))

    def on_handoff(self, internal_id: str, attempt: int) -> None:
        """Another pod will go on with the leg."""
        key = LegKey(internal_id, attempt)
        if key in self.legs:
            self._process.log(internal_id, f"leg {attempt} is asked to leave")
            self._pod.post_later(HandOver(key=key))

    def fail_all(self, message: str, kind: FailKind = "internal") -> None:
        """The engine is gone, or has to go: every leg ends at once."""
        for served in tuple(self.legs.values()):
            self._send(served, Fail(kind=kind, message=message))
            self._over(served)
        for key, _ in tuple(self.attached.values()):
            self._detach(key)

    # ---- frames

    def _send(self, served: ServedLeg, frame: Frame) -> None:
        if isinstance(frame, Tokens) and not 0 <= frame.choice < len(served.writers):
            raise Violation("server", f"no choice {frame.choice}", served.key.internal_id)
        served.stream.send(1, frame)

    def alive(self, ticks: int) -> None:
        """Only while the engine's loop turns."""
        if ticks <= self._ticks:
            return
        self._ticks = ticks
        for stream in [served.stream for served in self.legs.values()] + list(self.attached):
            stream.send(1, Alive(step=ticks))
