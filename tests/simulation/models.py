"""The models that pods serve: the toy, and another one of its kind whose every token is another."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry_runtime.model.toy_spec import ToySpec

SPEC = ToySpec(vocab=300, ctx=512, eos_every=23)


@dataclass(frozen=True, slots=True)
class Model:
    """Two pods of one model have the same compat hash, and only they."""

    compat_hash: str
    shift: int  # of each candidate, within the ids that the toy picks

    def candidates(self, toy: Sequence[int]) -> tuple[int, ...]:
        """What this model picks from where the toy has these candidates."""
        low, count = SPEC.emit_range()
        return tuple([each if each == SPEC.eos_token_id else low + (each - low + self.shift) % count for each in toy])


TOY = Model("toy", 0)
OTHER = Model("other", 47)
MODELS = {model.compat_hash: model for model in (TOY, OTHER)}
