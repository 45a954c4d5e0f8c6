"""The decode figure is of the steps in which every answer decodes: prefill's share must not enter it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decode.py"


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_decode", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_staggered_prefill_and_the_tail_do_not_count(decode: ModuleType) -> None:
    """Answer 0 decodes alone during the prefill of 1, slowly; then both for ten steps of 0.5 s; then 1 alone."""
    steps = [(10.0, [0]), (20.0, [0]), (30.0, [0, 1])]
    steps += [(30.0 + 0.5 * step, [0, 1]) for step in range(1, 11)]
    steps += [(100.0, [1])]
    assert decode.decode_rate(steps, 2) == pytest.approx(4.0)


def test_too_few_steps_give_no_figure(decode: ModuleType) -> None:
    """A rate of a step or two would be noise."""
    with pytest.raises(RuntimeError, match="in decode for 1 steps"):
        decode.decode_rate([(1.0, [0]), (2.0, [0])], 1)


def test_an_answer_without_tokens_gives_no_figure(decode: ModuleType) -> None:
    """It would count as infinitely fast."""
    with pytest.raises(RuntimeError, match="1 of 2 answers"):
        decode.decode_rate([(float(step), [0]) for step in range(20)], 2)
