"""Clients: each sends one request, reads its answer, judges every character at once, and may leave."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry_router import flow_messages as messages
from tests.simulation.answers import DONE, Answer, events, read_ending
from tests.simulation.fabric import Fabric
from tests.simulation.invariants import check_forgotten, check_no_work
from tests.simulation.links import GOOD, Stream
from tests.simulation.scenario import Request
from tests.simulation.world import Process, Violation

if TYPE_CHECKING:
    from tests.simulation.router_shell import Router

_FORGOTTEN_S = 1.0
_AT_WORK_S = 2.5  # a step that was slowed down, a cut that was noticed late


@dataclass(eq=False)
class Client:
    """One client. ``outcome`` is how it ended, once it has.

    ``answers``: the right ones, by the model that may answer. An answer is of one model from its first token to its
    last, so that those which the text contradicts are out.
    """

    request: Request
    answers: dict[str, tuple[Answer, ...]]
    process: Process
    fabric: Fabric
    texts: list[str] = field(default_factory=list)
    outcome: str = ""
    got: int = 0
    left_at: float | None = None
    stream: Stream | None = None
    router: str = ""  # that took the request
    _going: bool = False

    def start(self) -> None:
        self.texts = ["" for _ in range(self.request.n)]
        router = self._reach()
        if router is None:
            self._end("refused")
            return
        self.router = router.name
        self.stream = self.fabric.stream("client", self.request.name, (self, router), self.process, router.process)
        self.stream.send(0, self.request)
        if self.request.leaves_at is not None:
            self.process.soon(self.request.leaves_at, self.leave)

    def _reach(self) -> "Router | None":
        """A router of the service: any of them, but one that is up before one that is not."""
        routers = sorted(self.fabric.routers.values(), key=lambda router: router.name)
        rng = self.process.world.rng(f"reaches/{self.request.name}")
        return next((router for router in rng.sample(routers, len(routers)) if router.process.up), None)

    def on_stage(self, stage: str) -> None:
        """The request is at a stage: whoever leaves there does so at once, or a moment later."""
        if self.request.leaves_in == stage and not self._going:
            self._going = True
            rng = self.process.world.rng(f"leaves/{self.request.name}")
            self.process.soon(rng.choice((0.0, 0.002, 0.01)) * rng.random(), self._leave_in, stage)

    def _leave_in(self, stage: str) -> None:
        if not self.outcome:
            self.process.world.count(f"left_in_{stage}")
            self.leave()

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
                body, done, ending = message.data.partition(DONE)
                self._take(body)
                self._clean_end(bool(done), ending)
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
        elif self.fabric.profile.http == GOOD:
            self.process.soon(_AT_WORK_S, check_no_work, self.request.name, self.fabric)
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
            self._narrow(choice)

    def _narrow(self, choice: int) -> None:
        given = self.texts[choice]
        fitting = {name: answers for name, answers in self.answers.items() if answers[choice].text.startswith(given)}
        if not fitting:
            right = [answers[choice].text for answers in self.answers.values()]
            raise Violation("wrong_token", f"choice {choice}: {given!r} given, right is {right}", self.request.name)
        self.answers = fitting

    def _clean_end(self, done: bool, data: bytes) -> None:
        name = self.request.name
        whole = [answers for answers in self.answers.values() if [answer.text for answer in answers] == self.texts]
        if not done or not whole:
            raise Violation("false_end", f"clean end after {self.texts}, right is {self.answers}", name)
        answers, ending = whole[0], read_ending(data)
        reasons = tuple([answer.finish for answer in answers])
        if ending.finish != reasons:
            raise Violation("finish_reason", f"{ending.finish} given, right is {reasons}", name)
        right = (len(self.request.prompt), sum(answer.tokens for answer in answers))
        if (ending.prompt_tokens, ending.completion_tokens) != right:
            raise Violation("usage", f"{ending} given, right is {right}", name)
        if ending.cached_tokens not in self.fabric.cached.get(name, {0}):
            raise Violation("usage", f"{ending} given, told was {self.fabric.cached.get(name)}", name)
        self._end("ok")
