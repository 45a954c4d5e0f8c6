"""Clients of a service, and what came of a request."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "smollm2-135m-instruct"
ANSWER_S = 120.0
RESUMED = b": kvferry resumed: "
PROMPT = "Write one sentence about ferries that carry trains across a lake in winter, and say where they run."


@dataclass
class Answer:
    """One answer as a client saw it."""

    prompt: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    finish: str = ""  # "stop" or "length" where the model ended it
    done: bool = False  # whether the stream ended with [DONE]
    error: str = ""  # an explicit error, of the answer or in the stream
    cut: str = ""  # how the connection broke
    resumed: list[str] = field(default_factory=list)  # why other pods went on with it, as its comments say
    ended_at: float = 0.0  # on the monotonic clock, of a client of `Traffic`

    @property
    def path(self) -> str:
        return self.headers.get("x-kvferry-path", "")

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.done and bool(self.finish) and not self.error and not self.cut

    def fault(self, expected: Mapping[str, str]) -> str:
        """What is wrong with it: not whole, or another text than its prompt must have; empty where all is right."""
        if not self.whole:
            return self.told()
        wanted = expected.get(self.prompt, self.text)
        return "" if self.text == wanted else f"{self.told()}: {self.text!r} and not {wanted!r}"

    def told(self) -> str:
        """What it is, in words."""
        request, path = self.headers.get("x-request-id", "unknown"), self.path or "no path"
        return (
            f"{request} ({path}): status {self.status}, {len(self.text)} characters, finish {self.finish!r},"
            f" done {self.done}, error {self.error!r}, cut {self.cut!r}"
        )


def request_body(prompt: str, max_tokens: int, model: str = MODEL) -> str:
    """A streamed chat completion without sampling."""
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
    )


def ask(
    address: str,
    prompt: str = PROMPT,
    *,
    max_tokens: int = 24,
    model: str = MODEL,
    on_token: Callable[[int], None] | None = None,
    timeout_s: float = ANSWER_S,
) -> Answer:
    """Ask for a streamed answer without sampling.

    Args:
        address: host and port.
        on_token: called after each piece of text with the number of pieces so far.
        timeout_s: without any byte.
    """
    answer = Answer(prompt)
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            request_body(prompt, max_tokens, model),
            {"content-type": "application/json"},
        )
        response = connection.getresponse()
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.getheaders()}
        if response.status != 200:
            answer.error = response.read().decode("utf-8", "replace")
            return answer
        read_events(iter(response.readline, b""), answer, on_token)
    except (OSError, http.client.HTTPException) as error:
        answer.cut = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer


def read_events(lines: Iterator[bytes], answer: Answer, on_token: Callable[[int], None] | None = None) -> None:
    """Fill in an answer from the lines of its event stream."""
    pieces = 0
    for line in lines:
        if line.startswith(RESUMED):
            answer.resumed.append(line.removeprefix(RESUMED).decode().strip())
        if not line.startswith(b"data:"):
            continue
        content = line[5:].strip()
        if content == b"[DONE]":
            answer.done = True
            continue
        event: dict[str, Any] = json.loads(content)
        if "error" in event:
            answer.error = json.dumps(event["error"])
            continue
        for choice in event.get("choices", ()):
            answer.finish = choice.get("finish_reason") or answer.finish
            text = (choice.get("delta") or {}).get("content") or ""
            if text:
                answer.text += text
                pieces += 1
                if on_token:
                    on_token(pieces)


class Traffic:
    """Clients that ask one request after the other until they are stopped."""

    def __init__(self, asker: Callable[[str], Answer], clients: int, prompts: Sequence[str]) -> None:
        self.answers: list[Answer] = []
        self._asker = asker
        self._prompts = prompts
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def _client(self, number: int) -> None:
        asked = 0
        while not self._stop.is_set():
            prompt = f"{PROMPT} This is question {asked} of client {number}."
            if self._prompts:
                prompt = self._prompts[(asked + number) % len(self._prompts)]
            answer = self._asker(prompt)
            answer.ended_at = time.monotonic()
            self.answers.append(answer)
            asked += 1
            if not answer.whole:
                self._stop.wait(0.2)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Answer]:
        """End after the answers under way; returns all of them."""
        self._stop.set()
        deadline = time.monotonic() + ANSWER_S + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"a client waits for its answer for over {ANSWER_S:g} s"
        return self.answers

    def failures(self) -> list[str]:
        return [answer.told() for answer in self.answers if not answer.whole]


@contextmanager
def traffic(asker: Callable[[str], Answer], clients: int = 2, prompts: Sequence[str] = ()) -> Iterator[Traffic]:
    """Clients that ask while the body of the ``with`` does something.

    Args:
        prompts: what they ask, in turn; each question is another one where none is given.
    """
    running = Traffic(asker, clients, prompts)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def undisturbed(asker: Callable[[str], Answer], count: int) -> dict[str, str]:
    """Answers to some prompts when nothing happens: what each must be whatever happens, since nothing is sampled."""
    found = {}
    for number in range(count):
        answer = asker(f"{PROMPT} Tell all that you know, in many words, for reader {number}.")
        assert answer.whole, answer.told()
        found[answer.prompt] = answer.text
    return found
