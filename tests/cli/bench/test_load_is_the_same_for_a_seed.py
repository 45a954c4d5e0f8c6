"""The load: lengths as asked, no two prompts alike, and everything from the seed."""

from itertools import combinations

import msgspec
import pytest

from kvferry_cli.bench.load import WORDS, Request, Schedule
from tests.cli.bench.builders import LOAD

IDS = tuple((index, index + 1000, index + 2000)[: 1 + index % 3] for index in range(len(WORDS)))


def requests(schedule: Schedule) -> list[Request]:
    made = [schedule.prompt(number, index) for number in range(-1, 3) for index in range(3)]
    return made + [
        schedule.stream(number, slot, index) for number in range(-1, 3) for slot in range(2) for index in (0, 1)
    ]


def test_the_same_seed_gives_the_same_load() -> None:
    """Prompts and pauses, in whatever order they are asked for."""
    one, two = Schedule(LOAD, IDS), Schedule(LOAD, IDS)
    assert requests(one) == requests(two)
    assert [one.pause(0, index) for index in (2, 0, 1)] == [two.pause(0, index) for index in (2, 0, 1)]
    other = Schedule(msgspec.structs.replace(LOAD, seed=1), IDS)
    assert all(a.prompt_ids != b.prompt_ids for a, b in zip(requests(one), requests(other), strict=True))


def test_prompts_have_their_length_and_share_no_block() -> None:
    """No prefix cache can help: within the first four tokens any two prompts differ."""
    made = requests(Schedule(LOAD, IDS))
    assert {(request.kind, len(request.prompt_ids), request.answer_tokens) for request in made} == {
        ("prompt", 20, 3),
        ("stream", 4, 8),
    }
    assert len({request.name for request in made}) == len(made)
    assert all(a.prompt_ids[:4] != b.prompt_ids[:4] for a, b in combinations(made, 2))


def test_pauses_are_within_their_bound() -> None:
    """Also a bound of nothing."""
    schedule = Schedule(LOAD, IDS)
    pauses = [schedule.pause(0, index) for index in range(50)]
    assert all(0 <= pause <= 0.1 for pause in pauses)
    assert len(set(pauses)) == 50
    assert Schedule(msgspec.structs.replace(LOAD, pause_s=0.0), IDS).pause(0, 0) == 0


def test_the_longest_sequence_counts_prompt_and_answer() -> None:
    """What a pod must be able to hold."""
    assert LOAD.longest == 23
    assert msgspec.structs.replace(LOAD, stream_tokens=60).longest == 64


@pytest.mark.parametrize("words", [(), ((1,), ())])
def test_words_without_tokens_are_refused(words: tuple[tuple[int, ...], ...]) -> None:
    """They would make prompts that never get long enough."""
    with pytest.raises(ValueError, match="words"):
        Schedule(LOAD, words)
