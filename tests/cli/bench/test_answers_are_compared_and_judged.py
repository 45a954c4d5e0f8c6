"""Both sides' answers must be the same; what differs is judged token by token, and a few that do not as well."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry_cli.bench import comparison
from kvferry_cli.bench.answers import compare_answers
from kvferry_cli.bench.client import AnswerError
from kvferry_cli.bench.comparison import Asked, judge_answers
from kvferry_cli.bench.load import Request
from kvferry_cli.bench.records import Round, Trace
from kvferry_cli.bench.reference import Reference
from kvferry_cli.errors import ExitCode, UserError
from kvferry_runtime.model.text_toy import toy_text
from kvferry_runtime.model.toy_oracle import toy_next_tokens
from kvferry_runtime.model.toy_spec import ToySpec
from kvferry_text.tokenizer import TextTokenizer
from tests.cli.bench.builders import LOAD, make_rounds

PROMPT = tuple(range(60, 100))


def rounds_with(ours: dict[str, Any], theirs: dict[str, Any]) -> list[Round]:
    """One round of each side; the stream's answers are changed."""
    rounds = make_rounds({}, {}, count=1)
    for measured, changes in zip(rounds, (ours, theirs), strict=True):
        for field, value in changes.items():
            setattr(measured.traces[1], field, value)
    return rounds


CUT = {"finish": ""}


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [
        ({"text": "abc"}, {"text": "abc"}, False),
        ({"text": "abc"}, {"text": "abd"}, True),
        ({"text": "abc"}, {"text": "ab"}, True),  # both are said to be whole
        ({"text": "abc"}, {"text": "ab", **CUT}, False),
        ({"text": "ab", **CUT}, {"text": "abc"}, False),
        ({"text": "abc", **CUT}, {"text": "abd", **CUT}, True),
    ],
)
def test_answers_to_one_request_must_be_alike(ours: dict[str, Any], theirs: dict[str, Any], differ: bool) -> None:
    """As far as both went, where one was cut when its round was over."""
    compared = compare_answers(rounds_with(ours, theirs), seed=0)
    assert compared.equal == (1 if differ else 2)
    assert sum(doubt.differs for doubt in compared.doubts) == (2 if differ else 0)
    assert compared.answers == 4


def test_some_answers_are_judged_though_nothing_differs() -> None:
    """One of each kind and side, the same ones for the same seed; an answer without text is none."""
    rounds = make_rounds({}, {}, count=3)
    first, again = compare_answers(rounds, seed=5), compare_answers(rounds, seed=5)
    assert first == again
    assert len(first.doubts) == 4
    assert {(doubt.side, doubt.trace.request.kind) for doubt in first.doubts} == {
        (side, kind) for side in ("disaggregated", "aggregated") for kind in ("prompt", "stream")
    }
    assert compare_answers(rounds_with({"text": ""}, {}), seed=0).single == 1


# ---- the reference -------------------------------------------------------------------------------------------------


def toy_trace(tokens: int = 12) -> Trace:
    """A whole answer of the toy model, as its oracle has it."""
    ids = toy_next_tokens(PROMPT, tokens, ToySpec())
    detokenizer = TextTokenizer(toy_text(ToySpec())).detokenizer(PROMPT)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    request = Request(name="toy", kind="stream", prompt_ids=PROMPT, answer_tokens=tokens)
    return Trace(request=request, sent=0.0, text=text, finish="length", events=[1.0], completion_tokens=tokens)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("toy", "int64", 64)


def test_the_reference_finds_a_right_answer_right(reference: Reference) -> None:
    """Whole, cut anywhere, and in any order of asking: its KV memory is used again."""
    trace = toy_trace()
    assert reference.why_wrong(trace) == ""
    for length in (len(trace.text) // 2, 1):
        cut = toy_trace()
        cut.text, cut.finish = trace.text[:length], ""
        assert reference.why_wrong(cut) == ""
    assert reference.why_wrong(trace) == ""


def test_the_reference_finds_a_wrong_answer_wrong(reference: Reference) -> None:
    """A character changed anywhere, one missing at the end, one too many."""
    right = toy_trace().text
    for text in (
        *(right[:at] + ("~" if right[at] != "~" else "!") + right[at + 1 :] for at in range(0, len(right), 3)),
        right[:-1],
        right + "x",
    ):
        trace = toy_trace()
        trace.text = text
        assert "no pick of the reference" in reference.why_wrong(trace), text


def test_one_wrong_answer_and_there_are_no_figures() -> None:
    """The error names side, request and place; also when both sides are wrong alike."""
    wrong = toy_trace()
    wrong.request = Request(name="wrong", kind="prompt", prompt_ids=PROMPT, answer_tokens=12)
    wrong.text = "?" + wrong.text[1:]
    rounds = rounds_of(toy_trace(), wrong)
    with pytest.raises(AnswerError, match=r"2 answers are wrong: \w+, wrong: no pick of the reference"):
        judge_answers(asked(judged=8), rounds, "int64", lambda line: None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_answers_are_judged_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """As an interrupted command, and the folder with its keys goes."""

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), number)

    class NoRun:
        def __init__(self, *_: object) -> None:
            self.rounds, self.setups, self.pinning = [], {"aggregated": Dtype()}, ""

        async def all_rounds(self) -> None:
            pass

    class Dtype:
        dtype = "int64"

    monkeypatch.setattr(comparison, "_Run", NoRun)
    monkeypatch.setattr(comparison, "judge_answers", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(number)
    with pytest.raises(UserError, match=f"ended by {number.name}") as raised:
        comparison.measure(asked(judged=1), lambda line: None)
    assert raised.value.code is ExitCode.INTERRUPTED
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) == before


def test_right_answers_are_counted() -> None:
    """How many were alike, and how many were judged."""
    rounds = rounds_of(toy_trace())
    told: list[str] = []
    found = judge_answers(asked(judged=1), rounds, "int64", told.append)
    assert (found.answers, found.equal, found.differing, found.judged) == (2, 1, 0, 1)
    assert told == ["judging 1 of 2 answers by one pass of the model"]
    assert judge_answers(asked(judged=0), rounds, "int64", told.append).judged == 0


def rounds_of(*traces: Trace) -> list[Round]:
    """One round of each side, with the same answers."""
    return [msgspec.structs.replace(measured, traces=traces) for measured in make_rounds({}, {}, count=1)]


def asked(judged: int) -> Asked:
    load = msgspec.structs.replace(LOAD, prompt_tokens=len(PROMPT) + 12)
    fields = {"model": "toy", "load": load, "judged": judged, "words": ((1,),), "cores": (0,), "pinned": True}
    rest = {"manifest": None, "service": None, "apart": False, "start_s": 1.0, "round_s": 1.0}
    return Asked(**fields, **rest)  # type: ignore[arg-type]  # what judging does not look at
