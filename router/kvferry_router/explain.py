"""The last routing decisions, with each candidate's score as a formula: ``GET /internal/v1/decisions``."""

from collections import deque

from kvferry_router.select.policy import Decision
from kvferry_router.select.scorers import explain


class DecisionLog:
    """A ring of decisions; the text is made when it is asked for."""

    def __init__(self, size: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, decision: Decision) -> None:
        self._ring.append(decision)

    def newest_first(self) -> list[dict[str, object]]:
        """The decisions as JSON values. They name pods and sizes; no tenant, no token, no prompt."""
        return [_as_json(decision) for decision in reversed(self._ring)]


def _as_json(decision: Decision) -> dict[str, object]:
    return {
        "internal_id": decision.internal_id,
        "reason": decision.reason,
        "prefill": decision.prefill,
        "decode": decision.decode,
        "prompt_tokens": decision.prompt_tokens,
        "scores": {
            kind: [{"pod": score.pod, "seconds": score.total_s, "formula": explain(score)} for score in scores]
            for kind, scores in decision.scores.items()
        },
        "filtered": decision.filtered,
    }
