"""The toy model picks what its oracle says exactly when every slot of the context is right."""

import random

import pytest
import torch

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.loader import load_model
from kvferry_runtime.model.toy import ToyModel, toy_next_tokens
from kvferry_runtime.model.toy_oracle import toy_scores, toy_walk
from kvferry_runtime.model.toy_spec import ToySpec, parse_toy_name
from tests.support.paged import PagedRun

SPECS = (ToySpec(), ToySpec(emit="any"), ToySpec(layers=2, heads=3, dim=5, vocab=300))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("chunks", [(), (1,), (3, 1, 9), (4, 4, 4)])
def test_any_chunking_gives_the_oracles_tokens(spec: ToySpec, chunks: tuple[int, ...]) -> None:
    """Chunk borders within and between blocks change no token."""
    prompt = [random.Random(5).randrange(spec.vocab) for _ in range(21)]
    run = PagedRun(ToyModel(spec))
    sequence = run.sequence(prompt)
    for count in chunks:
        run.step([(sequence, count)])
    assert run.greedy(sequence, 9) == toy_next_tokens(prompt, 9, spec)


def test_batched_sequences_do_not_see_each_other() -> None:
    """Rows of one step, decodes beside a prefill chunk, give what each gives alone."""
    spec = ToySpec()
    run = PagedRun(ToyModel(spec))
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [7] * 30]
    a, b, c = (run.sequence(prompt) for prompt in prompts)
    run.step([(a, 5), (b, 2)])
    hidden = run.step([(b, 1), (c, 17)])
    assert int(run.model.logits(hidden[0])[0].argmax()) == toy_next_tokens(prompts[1], 1, spec)[0]
    hidden = run.step([(c, 13)])
    assert int(run.model.logits(hidden[0][-1:])[0].argmax()) == toy_next_tokens(prompts[2], 1, spec)[0]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("damage", ["missing", "foreign", "swapped", "stale", "half", "value only"])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_any_wrong_block_gives_wrong_scores(spec: ToySpec, damage: str, where: int) -> None:
    """A block of the context that is zero, another's, out of order, old, or half there changes the next scores."""
    prompt = list(range(40, 61))
    run = PagedRun(ToyModel(spec))
    sequence, other = run.sequence(prompt), run.sequence([token + 1 for token in prompt])
    run.step([(sequence, 20), (other, 20)])
    memory, table = run.kv.tensor(), sequence.table
    block = table[where]
    before = memory.clone()
    if damage == "missing":
        memory[block] = 0
    elif damage == "foreign":
        memory[block] = memory[other.table[where]]
    elif damage == "swapped":
        memory[[block, table[1]]] = memory[[table[1], block]]
    elif damage == "stale":
        memory[block] = -77
    elif damage == "half":
        memory[block, ..., 2:, :] = 0
    else:
        memory[block, :, 1] += 1
    assert not torch.equal(before, memory)
    hidden = run.step([(sequence, 1)])[0]
    candidates = next(toy_walk(prompt, [], spec))
    assert run.model.logits(hidden)[0].tolist() != toy_scores(candidates, spec)


def test_scores_leave_four_candidates_that_sampling_can_pick() -> None:
    """Four distinct tokens with scores one apart; all others are out of any sampler's reach."""
    spec = ToySpec()
    prompt = [5, 6, 7]
    run = PagedRun(ToyModel(spec))
    scores = run.model.logits(run.step([(run.sequence(prompt), 3)])[0][-1:])[0]
    candidates = next(toy_walk(prompt, [], spec))
    assert scores.tolist() == toy_scores(candidates, spec)
    assert len(set(candidates)) == 4
    assert scores.topk(5).values.tolist() == [8.0, 7.0, 6.0, 5.0, -100.0]


def test_the_oracle_follows_sampled_tokens() -> None:
    """The walk yields candidates given what was picked, not what greedy would have picked."""
    spec = ToySpec()
    picked: list[int] = []
    walk = toy_walk([1, 2, 3], picked, spec)
    second = next(walk)[1]
    picked.append(second)
    assert next(walk) == next(toy_walk([1, 2, 3, second], [], spec))


def test_end_of_sequence_comes_where_asked_for() -> None:
    """With ``eos_every`` answers end by themselves, after a token-dependent number of tokens."""
    spec = ToySpec(eos_every=10)
    answers = [toy_next_tokens([start], 200, spec) for start in range(20)]
    assert all(answer[-1] == spec.eos_token_id for answer in answers)
    assert len({len(answer) for answer in answers}) > 5


def test_the_name_sets_the_knobs() -> None:
    """A toy's name is its whole configuration."""
    loaded = load_model("toy:vocab=300,ctx=128,heads=2,emit=any,step_ms=1.5")
    assert loaded.config.vocab_size == 300
    assert loaded.config.max_model_len == 128
    assert loaded.dtype == "int64"
    assert loaded.model.kv_groups()[0].kv_heads == 2
    assert parse_toy_name("toy") == ToySpec()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("toy:vocab", "'vocab'"),
        ("toy:size=3", "'size=3'"),
        ("toy:vocab=many", "vocab"),
        ("toy:vocab=12", "vocab is 12; 258.."),
        ("toy:emit=words", "emit"),
        ("toy:step_ms=-1", "step_ms is -1"),
        ("toy:ctx=99999999", "ctx is 99999999"),
    ],
)
def test_a_wrong_name_is_refused_by_its_part(name: str, said: str) -> None:
    """Unknown knobs and values out of range are named."""
    with pytest.raises(ModelError, match=said):
        load_model(name)
