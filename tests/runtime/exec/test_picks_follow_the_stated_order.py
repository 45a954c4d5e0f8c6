"""The sampler against its plain twin, and what a pick must not depend on (B037, B045)."""

import math
import random

import pytest
import torch

from kvferry_runtime.core.plan import Pick
from kvferry_runtime.exec import sampler
from kvferry_runtime.exec.noise import gumbel, stream_key
from kvferry_runtime.exec.sampler import NonFiniteLogitsError, sample
from kvferry_wire.leg import Sampling
from tests.runtime.exec.sampler_twin import noise, pick_one

CLOSE = 1e-4  # a lead below this may go either way in float32


def make_pick(*, seed: int = 1, position: int = 5, banned: tuple[int, ...] = (), **sampling: object) -> Pick:
    fields = {"seed": seed, "max_tokens": 10, **sampling}
    return Pick(0, position, seed, Sampling(**fields), banned)


def make_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_pick(source: random.Random, vocab: int) -> Pick:
    return make_pick(
        seed=source.randrange(2**63),
        position=source.randrange(5000),
        banned=tuple(source.sample(range(vocab), source.choice([0, 0, 3]))),
        temperature=source.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=source.choice([0, 0, 1, 5, 40]),
        top_p=source.choice([1.0, 1.0, 0.9, 0.4, 1e-6]),
        min_p=source.choice([0.0, 0.0, 0.05, 0.5]),
    )


@pytest.mark.parametrize("vocab", [7, 63, 3001])
def test_every_pick_is_that_of_the_plain_twin(vocab: int) -> None:
    """Random settings in one batch; only picks with a lead below float32's reach may differ, and few have one."""
    source = random.Random(vocab)
    close = 0
    for round_ in range(12):
        logits = make_logits(16, vocab, seed=round_)
        picks = [random_pick(source, vocab) for _ in range(16)]
        expected = [pick_one(row, pick) for row, pick in zip(logits.tolist(), picks, strict=True)]
        for got, (token, lead) in zip(sample(logits.clone(), range(16), picks), expected, strict=True):
            close += lead < CLOSE
            assert got == token or lead < CLOSE
    assert close < 10


def test_each_row_of_a_mixed_batch_gets_what_it_gets_alone() -> None:
    """B045: greedy, top_k 1, tiny top_p and seeded sampling side by side, in any order."""
    logits = make_logits(1, 2000)
    picks = [
        make_pick(temperature=0.0),
        make_pick(temperature=0.9, top_k=1),
        make_pick(temperature=1.0, top_p=1e-6),
        make_pick(temperature=1.0, seed=1),
        make_pick(temperature=1.3, min_p=0.01, seed=2),
        make_pick(temperature=0.7, top_p=0.9, top_k=50, seed=3),
    ]
    alone = [sample(logits.clone(), [0], [pick])[0] for pick in picks]
    assert alone[0] == alone[1] == alone[2] == int(logits.argmax())
    for order in (range(6), reversed(range(6)), [3, 0, 5, 1, 4, 2]):
        shuffled = list(order)
        got = sample(logits.clone(), [0] * 6, [picks[index] for index in shuffled])
        assert got == [alone[index] for index in shuffled]


def test_banned_ids_are_never_picked_whatever_the_settings() -> None:
    """B037: all of them, greedy and sampled, also when they are the best ones by far."""
    logits = make_logits(1, 50)
    logits[0, [7, 9, 11]] = 100.0
    for fields in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"top_p": 0.1}):
        for position in range(20):
            (token,) = sample(logits.clone(), [0], [make_pick(banned=(7, 9, 11, 99), position=position, **fields)])
            assert token not in (7, 9, 11)


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not() -> None:
    """No hidden state: a pick repeated is the same; seeds and positions are independent streams."""
    logits = make_logits(1, 1000, scale=0.5)
    by_position = [sample(logits.clone(), [0], [make_pick(position=p)])[0] for p in range(40)]
    again = sample(logits.clone(), [0] * 40, [make_pick(position=p) for p in range(40)])
    assert by_position == again
    assert len(set(by_position)) > 30
    assert len({sample(logits.clone(), [0], [make_pick(seed=s)])[0] for s in range(40)}) > 30


def test_draws_have_the_softmax_distribution() -> None:
    """Chi-square over 20 000 positions stays below the 99.9 % quantile, with and without temperature."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -3.0]])
    for temperature in (1.0, 0.6):
        probabilities = (logits[0] / temperature).softmax(0)
        picks = [make_pick(seed=11, position=p, temperature=temperature) for p in range(20_000)]
        counts = torch.bincount(torch.tensor(sample(logits.clone(), [0] * len(picks), picks)), minlength=6)
        chi_square = ((counts - 20_000 * probabilities) ** 2 / (20_000 * probabilities)).sum()
        assert chi_square < 20.5


def test_noise_is_that_of_splitmix_and_standard_gumbel() -> None:
    """Equal to the plain twin; mean 0.5772 and variance 1.645 within five standard errors."""
    keys = torch.tensor([stream_key(2**63 - 1, 9), stream_key(0, 0)])
    tokens = torch.tensor([0, 1, 77, 49151])
    got = gumbel(keys, tokens)
    for row, (seed, position) in enumerate([(2**63 - 1, 9), (0, 0)]):
        for column, token in enumerate(tokens.tolist()):
            assert math.isclose(got[row, column].item(), noise(seed, position, token), rel_tol=1e-4, abs_tol=1e-5)
    many = gumbel(torch.tensor([stream_key(5, 5)]), torch.arange(200_000)).double()
    assert abs(many.mean() - 0.57722) < 5 * 1.2825 / 200_000**0.5
    assert abs(many.var() - 1.64493) < 0.05


def test_equal_scores_are_kept_by_rising_id() -> None:
    """A cut of top_k among equal scores keeps the lowest ids, in a small vocabulary and beyond the fast prefix."""
    for vocab in (50, 5000):
        logits = torch.zeros(1, vocab)
        logits[0, 3] = 1.0
        drawn = {sample(logits.clone(), [0], [make_pick(top_k=4, position=p)])[0] for p in range(60)}
        assert drawn == {0, 1, 2, 3}


def test_filters_beyond_the_fast_prefixes_fall_back_to_a_full_sort() -> None:
    """Flat distributions of which filters keep 4500, 9000 and more ids, beside one that keeps three."""
    logits = make_logits(5, 10_000, scale=0.01)
    picks = [make_pick(top_p=p) for p in (0.45, 0.9)] + [
        make_pick(min_p=0.97),
        make_pick(top_k=9500),
        make_pick(top_k=3),
    ]
    expected = [pick_one(row, pick) for row, pick in zip(logits.tolist(), picks, strict=True)]
    assert sample(logits.clone(), range(5), picks) == [token for token, _ in expected]
    lengths = {}
    for rows, kept in sampler._filter(logits.clone(), sampler._Filters.of([pick.sampling for pick in picks])):
        lengths.update(zip(rows.tolist(), kept.lengths.tolist(), strict=True))
    assert 4400 < lengths[0] < 4600
    assert 8950 < lengths[1] < 9050
    assert (lengths[3], lengths[4]) == (9500, 3)


def test_picks_of_one_row_share_its_logits() -> None:
    """Choices that fork: several picks from one row, each with its own seed and bans."""
    logits = make_logits(2, 300)
    picks = [make_pick(seed=s) for s in range(3)]
    alone = [sample(logits[1:].clone(), [0], [pick])[0] for pick in picks]
    assert sample(logits.clone(), [1, 1, 1], picks) == alone
    best = int(logits[0].argmax())
    greedy = sample(logits.clone(), [0, 0], [make_pick(temperature=0, banned=(best,)), make_pick(temperature=0)])
    assert greedy[1] == best != greedy[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_an_error(bad: float) -> None:
    """A broken model picks nothing."""
    logits = make_logits(2, 10)
    logits[1, 4] = bad
    with pytest.raises(NonFiniteLogitsError):
        sample(logits, [0, 1], [make_pick(temperature=0), make_pick()])
