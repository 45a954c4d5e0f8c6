"""Products with packed weights equal torch's, whatever the shape, and a row's bits do not depend on the other rows."""

import pytest
import torch
from torch import Tensor

from kvferry_kernels.linear import native, reference
from kvferry_kernels.linear.native import PackedWeight
from kvferry_kernels.native.library import NativeLibrary

SHAPES = [(1, 1), (5, 3), (32, 16), (33, 17), (31, 64), (251, 65), (64, 129), (3077, 24), (576, 1536)]  # out, in
ROWS = [1, 2, 5, 6, 7, 11, 12, 13, 24, 25, 37, 64]


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor, inner: int) -> None:
    torch.testing.assert_close(got.double(), expected, atol=2e-6 * inner**0.5 * 4, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_odd_shapes(library: NativeLibrary, threads: int, rows: int, shape: tuple[int, int]) -> None:
    """Alone, added to an output, and gated; compared with float64."""
    outer, inner = shape
    weight, other, x = make(outer, inner), make(outer, inner, seed=1), make(rows, inner, seed=2)
    packed, packed_other = PackedWeight(library, weight), PackedWeight(library, other)
    close(native.linear(library, x, packed), reference.linear(x.double(), weight.double()), inner)
    out = make(rows, outer, seed=3)
    expected = out.double()
    reference.add_linear(x.double(), weight.double(), expected)
    native.add_linear(library, x, packed, out)
    close(out, expected, inner)
    gated = native.gated_linear(library, x, packed, packed_other)
    close(gated, reference.gated_linear(x.double(), weight.double(), other.double()), inner * 16)


@pytest.mark.parametrize("shape", [(70, 33), (576, 1536)], ids=str)
def test_a_row_is_the_same_bits_in_any_batch(library: NativeLibrary, threads: int, shape: tuple[int, int]) -> None:
    """Every number of rows up to 40, and each row alone, on one thread and two."""
    outer, inner = shape
    gate, up = PackedWeight(library, make(outer, inner)), PackedWeight(library, make(outer, inner, seed=1))
    x = make(40, inner, seed=2)
    torch.set_num_threads(1)
    alone = torch.cat([native.linear(library, x[row : row + 1], gate) for row in range(40)])
    gated = torch.cat([native.gated_linear(library, x[row : row + 1], gate, up) for row in range(40)])
    torch.set_num_threads(threads)
    for rows in range(1, 41):
        assert torch.equal(native.linear(library, x[:rows], gate), alone[:rows])
        assert torch.equal(native.gated_linear(library, x[:rows], gate, up), gated[:rows])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_come_back_as_they_were(library: NativeLibrary, shape: tuple[int, int]) -> None:
    """A packed weight still holds its rows, bit for bit."""
    weight = make(*shape)
    indices = torch.randint(0, shape[0], (19,), generator=torch.Generator().manual_seed(1))
    indices[:2] = torch.tensor([0, shape[0] - 1])
    packed = PackedWeight(library, weight)
    assert torch.equal(native.rows(library, packed, indices), reference.rows(weight, indices))
    assert native.rows(library, packed, indices[:0]).shape == (0, shape[1])


def test_no_rows_give_no_rows(library: NativeLibrary, threads: int) -> None:
    """An empty batch is a batch."""
    packed = PackedWeight(library, make(33, 7))
    assert native.linear(library, torch.empty((0, 7)), packed).shape == (0, 33)
    assert native.gated_linear(library, torch.empty((0, 7)), packed, packed).shape == (0, 33)


def test_rows_that_are_a_slice_are_multiplied(library: NativeLibrary) -> None:
    """A view into wider rows is copied, not misread."""
    weight, wide = make(20, 9), make(6, 30, seed=1)
    out = native.linear(library, wide[:, 3:12], PackedWeight(library, weight))
    torch.testing.assert_close(out, wide[:, 3:12] @ weight.t(), atol=1e-5, rtol=1e-5)


def test_a_damaged_number_stays_visible(library: NativeLibrary) -> None:
    """NaN in a row makes that row NaN and no other; so does an infinite gate with nothing to gate."""
    weight = PackedWeight(library, make(40, 24))
    x = make(5, 24, seed=1)
    x[2, 7] = float("nan")
    for out in (native.linear(library, x, weight), native.gated_linear(library, x, weight, weight)):
        assert out[2].isnan().all()
        assert out[[0, 1, 3, 4]].isfinite().all()


def test_large_and_small_gates(library: NativeLibrary) -> None:
    """silu over the whole range of float32's exponent, where e^x overflows or vanishes."""
    x = torch.tensor([-1e30, -200.0, -88.5, -87.2, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0, 88.5, 200.0, 1e30])
    one = PackedWeight(library, torch.ones(1, 1))
    got = native.gated_linear(library, x[:, None], one, PackedWeight(library, torch.ones(1, 1)))[:, 0]
    expected = (torch.nn.functional.silu(x.double()) * x.double()).float()
    torch.testing.assert_close(got, expected, atol=1e-30, rtol=1e-5)


def test_tensors_that_do_not_fit_are_refused(library: NativeLibrary) -> None:
    """By name, with what was given and what is accepted, before a pointer is used."""
    packed = PackedWeight(library, make(8, 4))
    with pytest.raises(ValueError, match=r"x: torch.float32 \[3, 5\].*\[any, 4\] is accepted"):
        native.linear(library, make(3, 5), packed)
    with pytest.raises(ValueError, match=r"x: torch\.float64"):
        native.linear(library, make(3, 4).double(), packed)
    with pytest.raises(ValueError, match=r"out: .*\[2, 8\]"):
        native.add_linear(library, make(3, 4), packed, make(2, 8))
    with pytest.raises(ValueError, match="one shape"):
        native.gated_linear(library, make(3, 4), packed, PackedWeight(library, make(8, 5)))
    with pytest.raises(ValueError, match="into"):
        PackedWeight(library, make(8, 4), torch.empty(3))
    for index in (-1, 8):
        with pytest.raises(ValueError, match=r"outside of 0\.\.7"):
            native.rows(library, packed, torch.tensor([0, index]))
