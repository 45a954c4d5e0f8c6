"""One step of computation: what the core asks of the model runner, and what it gets back."""

import msgspec

from kvferry_wire.leg import Sampling


class Pick(msgspec.Struct, frozen=True):
    """One token to pick from the logits after a row's last token."""

    choice: int
    position: int  # index in the sequence of the token picked: prompt length + ids emitted before it
    seed: int  # of the choice, 0..2**63-1
    sampling: Sampling
    banned: tuple[int, ...] = ()  # ids that must not be picked here (min_tokens)


class Row(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence to compute."""

    sequence: int  # names the sequence within this engine
    first: int  # position of the first of `token_ids`; all positions before it are in KV
    token_ids: tuple[int, ...]  # at least one
    table: tuple[int, ...]  # block ids, in the order of positions; covers first + len(token_ids) tokens
    picks: tuple[Pick, ...] = ()  # empty: a partial prefill, which picks nothing


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy a whole block, all layers, before any row of the step is computed."""

    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True):
    """What one step computes. Its ``repr`` shows no token."""

    number: int
    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def tokens(self) -> int:
        """Input tokens of the step."""
        return sum(len(row.token_ids) for row in self.rows)

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.sequence}@{row.first}+{len(row.token_ids)}" for row in self.rows)
        return f"StepPlan({self.number}, rows=[{rows}], copies={len(self.copies)})"


class StepResult(msgspec.Struct, frozen=True):
    """The picked ids: one per pick, in the order of the plan's rows and of each row's picks."""

    picks: tuple[int, ...]
