"""A leg while it lives in the engine: its choices and its sequences."""

from dataclasses import dataclass, field

from kvferry_runtime.core.endings import Ending, banned_ids, ending
from kvferry_runtime.core.messages import LegKey, Submit
from kvferry_runtime.core.plan import Pick
from kvferry_runtime.core.sequence import Sequence

_SEEDS = 2**63


@dataclass(slots=True)
class Choice:
    """One choice of the answer: the ids it has emitted, and whether it has ended."""

    emitted: list[int]
    ended: bool = False


@dataclass(slots=True, eq=False)
class LiveLeg:
    """One accepted leg."""

    submit: Submit
    arrival: int  # counts accepted legs
    deadline: float  # on the engine's clock
    extras: bytes  # canonical key extras
    max_model_len: int
    choices: list[Choice]
    sequences: list[Sequence] = field(default_factory=list)  # those that have not ended
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache when first admitted
    recomputed: str = ""  # told with the next output
    reserved: int = 0  # blocks promised to the lease of a prefill leg

    @property
    def key(self) -> LegKey:
        return self.submit.key

    @property
    def prompt_len(self) -> int:
        return len(self.submit.prompt_ids)

    def open_choices(self) -> list[int]:
        """Choices that have not ended."""
        return [index for index, choice in enumerate(self.choices) if not choice.ended]

    def unpicked_choices(self) -> list[int]:
        """Open choices whose first token is still to be picked."""
        return [index for index, choice in enumerate(self.choices) if not choice.ended and not choice.emitted]

    def tokens_of(self, choice: int) -> list[int]:
        """The input of one choice: the prompt and what it has emitted."""
        return [*self.submit.prompt_ids, *self.choices[choice].emitted]

    def ending_of(self, choice: int) -> Ending | None:
        """Whether the choice's emitted ids end it."""
        return ending(
            self.submit.sampling,
            self.submit.eos_token_ids,
            self.choices[choice].emitted,
            self.prompt_len,
            self.max_model_len,
        )

    def pick_for(self, choice: int) -> Pick:
        """The choice's next pick."""
        emitted = len(self.choices[choice].emitted)
        sampling = self.submit.sampling
        banned = banned_ids(sampling, self.submit.eos_token_ids, emitted) if emitted < sampling.min_tokens else ()
        return Pick(choice, self.prompt_len + emitted, (sampling.seed + choice) % _SEEDS, sampling, banned)

    def take_recomputed(self) -> str:
        """The reason why ferried KV was not used, once."""
        reason, self.recomputed = self.recomputed, ""
        return reason

    def __repr__(self) -> str:
        return f"LiveLeg({self.submit!r}, arrival={self.arrival}, open={self.open_choices()})"
