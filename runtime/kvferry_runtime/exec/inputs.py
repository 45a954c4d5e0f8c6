"""From a step's plan to the tensors that the model takes."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.core.plan import Pick, StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """``T`` tokens of all rows, one row after another. Tensors are int64."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    batch: AttentionBatch
    last_tokens: Tensor  # [R]: flat index of the last token of each row that picks
    picks: tuple[Pick, ...]  # in the plan's order
    logits_rows: tuple[int, ...]  # per pick: which of the R rows it picks from


def build_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """Flatten a plan's rows. The work per token is done by numpy, not by Python."""
    rows = plan.rows
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    firsts = np.array([row.first for row in rows], dtype=np.int64)
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    total = int(starts[-1])
    token_ids = np.fromiter(chain.from_iterable([row.token_ids for row in rows]), np.int64, total)
    contexts = firsts + lengths
    needed = -(-contexts // block_size)
    tables = np.zeros((len(rows), int(needed.max())), dtype=np.int64)
    for index, (row, count) in enumerate(zip(rows, needed.tolist(), strict=True)):
        tables[index, :count] = row.table[:count]
    if total == len(rows):
        row_of, positions = np.arange(total), firsts
    else:
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(total) - starts[row_of] + firsts[row_of]
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size
    # A block is opened when its first slot is written and the step does not fill it: the last one of a row, or none.
    tails = contexts % block_size
    opened = (tails > 0) & (firsts <= contexts - tails)
    open_blocks = tables[opened, needed[opened] - 1]
    picking = [index for index, row in enumerate(rows) if row.picks]
    return StepInputs(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        batch=AttentionBatch(
            query_starts=torch.from_numpy(starts),
            context_lens=torch.from_numpy(contexts),
            block_tables=torch.from_numpy(tables),
            slots=torch.from_numpy(slots),
            open_blocks=torch.from_numpy(open_blocks),
        ),
        last_tokens=torch.from_numpy(starts[1:][picking] - 1),
        picks=tuple(chain.from_iterable([row.picks for row in rows])),
        logits_rows=tuple(at for at, index in enumerate(picking) for _ in rows[index].picks),
    )
