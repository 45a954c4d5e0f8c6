"""The judgement that all fault tests lean on refuses what a wrong service would send."""

import json
from collections.abc import Callable

import pytest

from tests.processes.asking import Answer, Ask, judge, read_stream

ASK = Ask("A prompt. ", max_tokens=6, n=2, temperature=0.0)
TEXT = ASK.expected[0][0]


def stream(
    *texts: str, finish: str | None = "length", error: bool = False, done: bool = True, usage: int = 12
) -> bytes:
    """A stream of both choices' text, in these pieces."""
    events: list[object] = [
        {"choices": [{"index": index, "text": text, "finish_reason": None}]} for text in texts for index in (0, 1)
    ]
    if finish is not None:
        events += [{"choices": [{"index": index, "text": "", "finish_reason": finish}]} for index in (0, 1)]
        prompt = len(ASK.prompt)
        details = {"cached_tokens": 0}
        counts = {"prompt_tokens": prompt, "completion_tokens": usage, "total_tokens": prompt + usage}
        events.append({"choices": [], "usage": counts | {"prompt_tokens_details": details}})
    if error:
        events.append({"error": {"message": "lost", "type": "server_error", "param": None, "code": "engine_lost"}})
    lines = [f"data: {json.dumps(event)}" for event in events] + (["data: [DONE]"] if done else [])
    return "".join(f"{line}\n\n" for line in lines).encode()


def answered(body: bytes, *, broken: bool = False) -> Answer:
    answer = Answer(200, texts=["", ""], finish=[None, None], broken=broken)
    read_stream(answer, body)
    return answer


def test_right_answers_pass() -> None:
    """Whole; cut with an error; nothing but an error; cut by the death of the router."""
    judge(ASK, answered(stream(TEXT[:3], TEXT[3:])))
    judge(ASK, answered(stream(TEXT[:3], finish=None, error=True, done=False), broken=True))
    judge(ASK, answered(stream(finish=None, error=True, done=False), broken=True))
    judge(ASK, answered(stream(TEXT[:3], finish=None, done=False), broken=True), router_died=True)


WRONG: dict[str, Callable[[], Answer]] = {
    "a foreign character": lambda: answered(stream(TEXT[:3], chr(ord(TEXT[3]) ^ 1), TEXT[4:])),
    "a missing one": lambda: answered(stream(TEXT[:2], TEXT[3:])),
    "one twice": lambda: answered(stream(TEXT[:3], TEXT[2:])),
    "one too many": lambda: answered(stream(TEXT, "x")),
    "a clean end on a cut answer": lambda: answered(stream(TEXT[:3])),
    "done without an end": lambda: answered(stream(TEXT[:3], finish=None)),
    "another reason": lambda: answered(stream(TEXT, finish="stop")),
    "an error and done": lambda: answered(stream(TEXT, finish=None, error=True)),
    "an error, and the answer goes on": lambda: answered(stream(finish=None, error=True, done=False) + stream(TEXT)),
    "an error on a whole connection": lambda: answered(stream(TEXT[:3], finish=None, error=True, done=False)),
    "a cut without a word": lambda: answered(stream(TEXT[:3], finish=None, done=False), broken=True),
    "a whole body that is cut": lambda: answered(stream(TEXT[:3], finish=None, done=False)),
    "half an event": lambda: answered(stream(TEXT)[:-9]),
    "wrong usage": lambda: answered(stream(TEXT, usage=11)),
    "another status": lambda: Answer(404, texts=["", ""], finish=[None, None], error=_error()),
    "an error with text": lambda: Answer(503, texts=[TEXT[:2], ""], finish=[None, None], error=_error()),
    "an error of another shape": lambda: Answer(503, texts=["", ""], finish=[None, None], error={"detail": "x"}),
}


def _error() -> dict[str, object]:
    return {"message": "m", "type": "server_error", "param": None, "code": None}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail(name: str) -> None:
    """Each is caught, while it is read or when it is judged."""
    with pytest.raises(AssertionError):
        judge(ASK, WRONG[name]())
