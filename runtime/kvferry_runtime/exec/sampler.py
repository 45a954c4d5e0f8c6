"""From logits to token ids, for a whole batch of picks.

The order is part of the meaning: float32 logits; banned ids; greedy, or temperature; min-p; top-k; top-p; then the
argmax of logit / temperature + Gumbel noise (the Gumbel-max trick: a draw from the softmax of what the filters kept).

The noise of a token is a pure function of (seed of the choice, position, token id), see ``exec.noise``. So a pick does
not depend on the batch it is in, on the number of picks before it, or on how its prompt was cut into steps.

Filters keep a prefix of the ids ordered by falling score, equal scores by rising id. That order is taken from the
best few ids where they suffice (``_PREFIXES``), and from a full sort where they do not.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry_runtime.core.plan import Pick
from kvferry_runtime.exec.noise import gumbel, stream_key
from kvferry_wire.leg import Sampling

_PREFIXES = (256, 8192)
_NOISE_ROWS = 4  # rows whose noise is computed together: keeps the temporaries of a large vocabulary in cache


class NonFiniteLogitsError(RuntimeError):
    """A model's scores hold NaN or infinity where a token was to be picked."""


def sample(logits: Tensor, rows: Sequence[int], picks: Sequence[Pick]) -> list[int]:
    """Pick one id per pick.

    Args:
        logits: float32 [R, vocab]; may be overwritten.
        rows: per pick, its row of `logits`.
        picks: what to pick, at least one.

    Raises:
        NonFiniteLogitsError: the best score of a pick is no number.
    """
    scores = logits if list(rows) == list(range(logits.shape[0])) else logits[torch.tensor(list(rows))]
    scores = scores.float()
    _ban(scores, picks)
    best, ids = scores.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise NonFiniteLogitsError("the model's scores are not finite")
    drawn = [index for index, pick in enumerate(picks) if pick.sampling.temperature > 0]
    if drawn:
        chosen = torch.tensor(drawn)
        ids[chosen] = _draw(scores[chosen], [picks[index] for index in drawn])
    result: list[int] = ids.tolist()
    return result


def _ban(scores: Tensor, picks: Sequence[Pick]) -> None:
    at = [(index, token) for index, pick in enumerate(picks) for token in pick.banned if token < scores.shape[1]]
    if at:
        index, token = torch.tensor(at).unbind(1)
        scores[index, token] = -torch.inf


def _draw(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Ids [S] for picks with a temperature; scores: float32 [S, vocab], overwritten."""
    scores /= torch.tensor([pick.sampling.temperature for pick in picks]).unsqueeze(1)
    keys = torch.tensor([stream_key(pick.seed, pick.position) for pick in picks])
    filtered = [index for index, pick in enumerate(picks) if _is_filtered(pick.sampling)]
    plain = [index for index, pick in enumerate(picks) if not _is_filtered(pick.sampling)]
    ids = torch.empty(len(picks), dtype=torch.int64)
    vocabulary = torch.arange(scores.shape[1])
    for begin in range(0, len(plain), _NOISE_ROWS):
        some = torch.tensor(plain[begin : begin + _NOISE_ROWS])
        ids[some] = (scores[some] + gumbel(keys[some], vocabulary)).argmax(dim=-1)
    if filtered:
        some = torch.tensor(filtered)
        for rows, kept in _filter(scores[some], _Filters.of([picks[index].sampling for index in filtered])):
            noisy = kept.values + gumbel(keys[some[rows]], kept.ids)
            noisy[torch.arange(noisy.shape[1]) >= kept.lengths.unsqueeze(1)] = -torch.inf
            ids[some[rows]] = kept.ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
    return ids


def _is_filtered(sampling: Sampling) -> bool:
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


class _Filters(NamedTuple):
    """Filters of F rows: min_p float64 [F], top_k int64 [F] (0 is off), top_p float64 [F]."""

    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> "_Filters":
        return cls(
            torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.float64),
            torch.tensor([sampling.top_k for sampling in samplings]),
            torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64),
        )

    def rows(self, chosen: Tensor) -> "_Filters":
        return _Filters(self.min_p[chosen], self.top_k[chosen], self.top_p[chosen])


class _Kept(NamedTuple):
    """What the filters kept: of each row the first `lengths` of ids and values, best first."""

    ids: Tensor  # int64 [F, width]
    values: Tensor  # float32 [F, width]
    lengths: Tensor  # int64 [F]


def _filter(scores: Tensor, filters: _Filters) -> Iterator[tuple[Tensor, _Kept]]:
    """Apply min-p, top-k and top-p to scaled scores, float32 [F, vocab].

    Yields each row once: the rows (int64 [G]) that were settled together, and what was kept of them.
    """
    vocab = scores.shape[1]
    pending = torch.arange(scores.shape[0])
    for width in (*(prefix for prefix in _PREFIXES if prefix < vocab), vocab):
        rows, own = scores[pending], filters.rows(pending)
        if width < vocab:
            values, ids = rows.topk(width, dim=-1)
        else:
            values, ids = rows.sort(dim=-1, descending=True, stable=True)
        lengths, complete = _lengths(values, rows, own)
        if width < vocab:
            # Equal scores on both sides of the cut: topk does not say which of them it puts first.
            cut = lengths.clamp(max=width - 1).unsqueeze(1)
            complete &= (values.gather(1, cut - 1) != values.gather(1, cut)).squeeze(1)
        if bool(complete.any()):
            used = int(lengths[complete].max())
            yield pending[complete], _Kept(ids[complete, :used], values[complete, :used], lengths[complete])
            pending = pending[~complete]
        if not pending.numel():
            return


def _lengths(values: Tensor, scores: Tensor, filters: _Filters) -> tuple[Tensor, Tensor]:
    """How many of the best ids the filters keep, and whether `values` reached far enough to tell.

    Args:
        values: the best scores, falling, float32 [F, width].
        scores: all scores, float32 [F, vocab].
    """
    width, vocab = values.shape[1], scores.shape[1]
    exact = values.double()
    order = torch.arange(width)
    floor = exact[:, :1] + filters.min_p.log().unsqueeze(1)
    by_min_p = (exact >= floor).sum(dim=1)
    by_top_k = torch.where(filters.top_k > 0, filters.top_k, vocab)
    first = torch.minimum(by_min_p, by_top_k)
    open_ended = (filters.min_p == 0) & (by_top_k >= vocab)
    complete = open_ended | (first < width) | (width == vocab)
    kept = torch.where(order < first.unsqueeze(1), exact, -torch.inf)
    total = torch.where(open_ended, scores.logsumexp(dim=1).double(), kept.logsumexp(dim=1))
    mass = (kept - total.unsqueeze(1)).exp()
    before = mass.cumsum(dim=1) - mass  # probability of the ids ahead: the first that reaches top_p is kept too
    by_top_p = (before < filters.top_p.unsqueeze(1)).sum(dim=1)
    cuts = filters.top_p < 1
    complete &= ~cuts | (by_top_p < width) | (width == vocab)
    lengths = torch.where(cuts, torch.minimum(first, by_top_p), first).clamp(1, width)
    # Without a cut by min-p or top-k the row keeps all ids unless top-p cuts it.
    complete &= cuts | ~open_ended | (width == vocab)
    return lengths, complete
