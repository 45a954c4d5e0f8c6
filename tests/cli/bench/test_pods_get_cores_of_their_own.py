"""Pinning: distinct cores for each pod, or none at all and the reason."""

import pytest

from kvferry_cli.bench.cores import pin, shown


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [
        ((0, 1), {"p": 1, "d": 1}, {"p": (0,), "d": (1,)}),
        ((2, 3, 6, 7), {"p": 2, "d": 1}, {"p": (2, 3), "d": (6, 7)}),
        ((0, 1, 2, 3, 4), {"p": 1, "d": 2}, {"p": (0, 1), "d": (2, 3)}),
        ((5,), {"d": 1}, {"d": (5,)}),
    ],
)
def test_shares_are_equal_and_apart(
    cores: tuple[int, ...], threads: dict[str, int], expected: dict[str, tuple[int, ...]]
) -> None:
    """In the order of the pods; what is left over belongs to nobody."""
    assert pin(cores, threads) == (expected, "")


@pytest.mark.parametrize(
    ("cores", "threads", "why"),
    [
        ((0,), {"p": 1, "d": 1}, "2 compute threads of 2 pods share 1 cores"),
        ((0, 1, 2), {"p": 2, "d": 1}, "3 compute threads of 2 pods share 3 cores"),
    ],
)
def test_too_few_cores_are_told(cores: tuple[int, ...], threads: dict[str, int], why: str) -> None:
    """Nobody is pinned then."""
    assert pin(cores, threads) == ({}, why)


@pytest.mark.parametrize(
    ("cores", "words"),
    [((), "any core"), ((3,), "core 3"), ((2, 3, 4), "cores 2-4"), ((0, 2), "cores 0, 2")],
)
def test_cores_are_shown_in_words(cores: tuple[int, ...], words: str) -> None:
    """For the table."""
    assert shown(cores) == words
