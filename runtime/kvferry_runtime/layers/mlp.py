"""The gated MLP of Llama: down(silu(gate(x)) * up(x)), gate and up in one product."""

import torch
from torch import Tensor

from kvferry_runtime.layers.linear import Linear


class GatedMLP:
    """``gate_up`` yields [T, 2 * intermediate], gate first."""

    def __init__(self, gate_up: Linear, down: Linear, intermediate: int) -> None:
        self._gate_up = gate_up
        self._down = down
        self._intermediate = intermediate

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        both = self._gate_up(x)
        gate, up = both[:, : self._intermediate], both[:, self._intermediate :]
        return self._down(torch.nn.functional.silu(gate, inplace=True).mul_(up))
