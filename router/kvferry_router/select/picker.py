"""The least cost; equal ones at random, so that routers and requests spread."""

import random
from collections.abc import Sequence

from kvferry_router.select.scorers import Score

_EQUAL_S = 1e-9


def pick(scores: Sequence[Score], rng: random.Random) -> Score | None:
    """One of the cheapest; ``None`` of none."""
    if not scores:
        return None
    least = min(score.total_s for score in scores)
    best = [score for score in scores if score.total_s <= least + _EQUAL_S]
    return best[0] if len(best) == 1 else rng.choice(best)
