"""Selection: candidates -> filter -> score -> pick. Free of side effects; the caller books before it opens a leg."""

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvferry_router.flow_messages import Kind
from kvferry_router.select.candidates import Ask, Candidate
from kvferry_router.select.filters import why_not
from kvferry_router.select.picker import pick
from kvferry_router.select.scorers import CostModel, Score, score_alone, score_decode, score_prefill

Mode = Literal["auto", "always", "never"]

Reason = Literal[
    "split",  # prefill and decode on two pods
    "short",  # too few uncached tokens to be worth a transfer
    "cached",  # the decode pod has most of the prompt
    "never",  # the service does not split
    "no_prefill",  # no prefill pod that the decode pod could read from
    "no_decode",  # nothing can answer
    "retry",  # another pod for a leg that failed
    "resume",  # pods that go on with an answer
]


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds of conditional disaggregation, and the cost model.

    Attributes:
        disaggregate: ``auto`` goes by the two thresholds, ``always`` leaves them out, ``never`` splits nothing.
        disaggregate_min_tokens: a prompt with fewer uncached tokens at the best decode pod is decode's alone.
        disaggregate_max_cached_share: so is one of which more than this share (0..1) is cached there.
    """

    disaggregate: Mode = "auto"
    disaggregate_min_tokens: int = 64
    disaggregate_max_cached_share: float = 0.8
    costs: CostModel = field(default_factory=CostModel)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, why, and every candidate's score or the reason against it."""

    internal_id: str
    reason: Reason
    prefill: str | None
    decode: str | None
    prompt_tokens: int
    scores: dict[str, tuple[Score, ...]]  # "prefill", "decode", "alone"
    filtered: dict[str, dict[str, str]]  # "prefill", "decode" -> pod -> why not; "pairs" -> both -> why not
    compat_hash: str = ""  # of the chosen pods


def choose(ask: Ask, candidates: Sequence[Candidate], policy: Policy, rng: random.Random) -> Decision:
    """Choose a decode pod, and a prefill pod if splitting the work is worth it."""
    decode_pool, decode_out = _pool("decode", ask, candidates)
    prefill_pool, prefill_out = _pool("prefill", ask, candidates)
    filtered = {"prefill": prefill_out, "decode": decode_out}
    alone = tuple(score_alone(pod, ask, policy.costs) for pod in decode_pool)
    scores: dict[str, tuple[Score, ...]] = {"alone": alone}
    compat = {pod.name: pod.compat_hash for pod in candidates}
    best_alone = pick(alone, rng)
    if best_alone is None:
        return Decision(ask.internal_id, "no_decode", None, None, ask.prompt_tokens, scores, filtered)

    def chosen(reason: Reason, prefill: str | None, decode: str) -> Decision:
        return Decision(ask.internal_id, reason, prefill, decode, ask.prompt_tokens, scores, filtered, compat[decode])

    def alone_for(reason: Reason) -> Decision:
        return chosen(reason, None, best_alone.pod)

    alone_reason = _why_alone(ask, best_alone.terms["cached_tokens"], policy)
    if alone_reason is not None:
        return alone_for(alone_reason)
    scores["prefill"] = tuple(score_prefill(pod, ask, policy.costs) for pod in prefill_pool)
    scores["decode"] = tuple(score_decode(pod, ask, policy.costs) for pod in decode_pool)
    pair = _best_pair(compat, scores["prefill"], scores["decode"], ask.barred, rng)
    if ask.barred:
        filtered["pairs"] = {f"{prefill} {decode}": "transfers between them fail" for prefill, decode in ask.barred}
    if pair is None:
        return alone_for("no_prefill")
    return chosen("split", *pair)


def _why_alone(ask: Ask, cached: float, policy: Policy) -> Reason | None:
    if policy.disaggregate == "never":
        return "never"
    if policy.disaggregate == "always":
        return None
    if ask.prompt_tokens - cached < policy.disaggregate_min_tokens:
        return "short"
    if cached > policy.disaggregate_max_cached_share * ask.prompt_tokens:
        return "cached"
    return None


def choose_again(
    ask: Ask,
    candidates: Sequence[Candidate],
    policy: Policy,
    rng: random.Random,
    *,
    kind: Kind,
    ferried: bool,
) -> Decision:
    """Choose another pod of one kind for a leg that failed. ``ferried``: its prompt's KV waits at a prefill pod."""
    pool, out = _pool(kind, ask, candidates)
    if kind == "prefill":
        scores = tuple(score_prefill(pod, ask, policy.costs) for pod in pool)
    elif not ferried:
        scores = tuple(score_alone(pod, ask, policy.costs) for pod in pool)
    else:
        scores = tuple(score_decode(pod, ask, policy.costs) for pod in pool)
    best = pick(scores, rng)
    chosen = None if best is None else best.pod
    return Decision(
        internal_id=ask.internal_id,
        reason="retry",
        prefill=chosen if kind == "prefill" else None,
        decode=chosen if kind == "decode" else None,
        prompt_tokens=ask.prompt_tokens,
        scores={kind: scores},
        filtered={kind: out},
    )


def _pool(kind: Kind, ask: Ask, candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    pool, out = [], {}
    for pod in candidates:
        reason = why_not(kind, pod, ask)
        if reason:
            out[pod.name] = reason
        else:
            pool.append(pod)
    return pool, out


def _best_pair(
    compat: Mapping[str, str],
    prefill: Sequence[Score],
    decode: Sequence[Score],
    barred: frozenset[tuple[str, str]],
    rng: random.Random,
) -> tuple[str, str] | None:
    """The pair of least summed cost among two pods of equal compat hash that get KV across.

    The sum's terms are independent but for the pairs that cannot be: a pod with itself, and barred ones. So within a
    hash the best pair is made of the best pods of each side, one more than there are impossible pairs of any one pod.
    """
    pairs: list[tuple[Score, Score]] = []
    most = 2 + max(Counter(name for pair in barred for name in pair).values(), default=0)
    for group in sorted({compat[score.pod] for score in prefill} & {compat[score.pod] for score in decode}):
        givers = _best([score for score in prefill if compat[score.pod] == group], most, rng)
        takers = _best([score for score in decode if compat[score.pod] == group], most, rng)
        pairs += [
            (giver, taker)
            for giver in givers
            for taker in takers
            if giver.pod != taker.pod and (giver.pod, taker.pod) not in barred
        ]
    if not pairs:
        return None
    best = pick([Score(f"{p.pod}\0{d.pod}", p.total_s + d.total_s, {}) for p, d in pairs], rng)
    assert best is not None
    giver_pod, _, taker_pod = best.pod.partition("\0")
    return giver_pod, taker_pod


def _best(scores: Sequence[Score], most: int, rng: random.Random) -> list[Score]:
    """So many of the least costs, ties by chance."""
    return heapq.nsmallest(most, scores, key=lambda score: (score.total_s, rng.random()))
