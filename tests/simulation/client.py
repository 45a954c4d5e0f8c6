"""Clients: each sends one request, reads its answer, judges every character at once, and may leave."""

from dataclasses import dataclass, field

from kvferry_router import flow_messages as messages
from tests.simulation.answers import DONE, Answer, events
from tests.simulation.fabric import Fabric
from tests.simulation.invariants import check_forgotten
from tests.simulation.links import Stream
from tests.simulation.scenario import Request
from tests.simulation.world import Process, Violation

_FORGOTTEN_S = 1.0


@dataclass(eq=False)
class Client:
    """One client. ``outcome`` is how it ended, once it has."""

    request: Request
    answers: tuple[Answer, ...]
    process: Process
    fabric: Fabric
    texts: list[str] = field(default_factory=list)
    outcome: str = ""
    got: int = 0
    left_at: float | None = None
    stream: Stream | None = None

    def start(self) -> None:
        router = self.fabric.router
        self.texts = ["" for _ in self.answers]
        self.stream = self.fabric.stream("client", self.request.name, (self, router), self.process, router.process)
        self.stream.send(0, self.request)
        if self.request.leaves_at is not None:
            self.process.soon(self.request.leaves_at, self.leave)

    def leave(self) -> None:
        if not self.outcome:
            assert self.stream is not None
            self._end("left")
            self.left_at = self.process.world.now
            self.process.world.count("clients_left")
            self.stream.close(0)

    def on_message(self, stream: Stream, message: messages.Send | messages.FinishAnswer | messages.FailAnswer) -> None:
        self.got += 1
        match message:
            case messages.Send():
                self._take(message.data)
            case messages.FinishAnswer():
                body, done, finish = message.data.partition(DONE)
                self._take(body)
                self._clean_end(bool(done), finish.decode().split())
            case messages.FailAnswer():
                self._end(message.failure.code or "invalid")
        if self.request.leaves_after is not None and self.got >= self.request.leaves_after:
            self.leave()

    def on_close(self, stream: Stream) -> None:
        if not self.outcome:
            self._end("no_end")  # a broken stream; the client knows that it is not whole

    def on_cut(self, stream: Stream) -> None:
        self.on_close(stream)

    def _end(self, outcome: str) -> None:
        if self.outcome:
            raise Violation("two_ends", f"{self.outcome}, then {outcome}", self.request.name)
        self.outcome = outcome
        if self.fabric.profile.prompt_cancel:
            self.process.soon(_FORGOTTEN_S, check_forgotten, self.request.name, self.fabric)
        self.process.log(self.request.name, f"client: {outcome}")

    def _take(self, data: bytes) -> None:
        if self.outcome:
            raise Violation("bytes_after_end", f"{data!r} after {self.outcome}", self.request.name)
        for choice, first, text in events(data):
            if not 0 <= choice < len(self.texts) or first != len(self.texts[choice]):
                at = len(self.texts[choice]) if 0 <= choice < len(self.texts) else None
                raise Violation(
                    "order", f"choice {choice}: text at {first}, {at} characters are there", self.request.name
                )
            self.texts[choice] += text
            expected = self.answers[choice].text
            if not expected.startswith(self.texts[choice]):
                raise Violation(
                    "wrong_token",
                    f"choice {choice}: {self.texts[choice]!r} given, right is {expected!r}",
                    self.request.name,
                )

    def _clean_end(self, done: bool, finish: list[str]) -> None:
        expected = [answer.text for answer in self.answers]
        if not done or self.texts != expected:
            raise Violation("false_end", f"clean end after {self.texts}, right is {expected}", self.request.name)
        reasons = [answer.finish for answer in self.answers]
        if finish != reasons:
            raise Violation("finish_reason", f"{finish} given, right is {reasons}", self.request.name)
        self._end("ok")
