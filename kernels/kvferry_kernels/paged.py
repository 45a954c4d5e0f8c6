"""The rows of one step over a paged KV cache, as operators take them."""

from typing import NamedTuple

from torch import Tensor


class PagedBatch(NamedTuple):
    """All int64. A row is a run of consecutive positions of one sequence; ``T`` is the number of all rows' tokens."""

    starts: Tensor  # [rows + 1]: row i owns tokens starts[i] .. starts[i + 1] - 1
    contexts: Tensor  # [rows]: tokens of the sequence that are in the cache after this step
    tables: Tensor  # [rows, width]: block ids in order of position; what is behind the last one needed is not read
    slots: Tensor  # [T]: block * block_size + offset, where each token's K and V go
