"""Whatever form a weight is kept in, the product is the same, and the choice has a reason."""

import pytest
import torch

from kvferry_runtime.layers import embedding as embeddings
from kvferry_runtime.layers import linear
from kvferry_runtime.layers.embedding import make_embedding
from kvferry_runtime.layers.kernels import Kernels, choose_kernels
from kvferry_runtime.layers.linear import LinearKind, choose_linear, make_linear, packed_reason
from kvferry_runtime.layers.norm import RMSNorm


def kernels_for(kind: str) -> Kernels:
    """The C++ operators where the form needs them; without them the test is skipped."""
    kernels = choose_kernels(torch.float32, env={} if kind == "native" else {"KVFERRY_KERNELS": "torch"})
    if kind == "native" and kernels.library is None:
        pytest.skip(kernels.reason)
    return kernels


@pytest.mark.parametrize("kind", ["plain", "transposed", "packed", "native"])
@pytest.mark.parametrize("shape", [(1, 576, 960), (7, 33, 251), (32, 64, 3), (3, 1, 5), (5, 24, 3077)], ids=str)
def test_each_form_multiplies(kind: LinearKind, shape: tuple[int, int, int]) -> None:
    """Odd shapes, also with rows that are a slice of wider ones."""
    rows, inner, outer = shape
    source = torch.Generator().manual_seed(0)
    weight, wide = torch.randn((outer, inner), generator=source), torch.randn((rows, 2 * inner), generator=source)
    layer = make_linear(weight.clone(), kind, kernels_for(kind))
    for x in (wide[:, :inner].contiguous(), wide[:, :inner]):
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), x @ weight.t(), atol=1e-4, rtol=1e-4)
    padding = 32 * inner * 4 if kind == "native" else 0  # of the last panel
    assert weight.nbytes <= layer.nbytes <= weight.nbytes + padding


@pytest.mark.parametrize("vocab", [251, 1537, 2048])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("twice", [True, False], ids=["kept twice", "kept once"])
def test_a_tied_embedding_reads_and_multiplies_alike(
    vocab: int, rows: int, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each form a token's row is the weight's, and the product is with all tokens and no padding."""
    if not twice:
        monkeypatch.setattr(embeddings, "TWICE_BYTES", 0)
    source = torch.Generator().manual_seed(0)
    weight, x = torch.randn((vocab, 24), generator=source), torch.randn((rows, 24), generator=source)
    ids = torch.randint(0, vocab, (40,), generator=source)
    ids[:2] = torch.tensor([0, vocab - 1])
    for kind in ("plain", "transposed", "packed", "native"):
        embedding = make_embedding(weight.clone(), kind, kernels_for(kind), tied=True)
        with torch.inference_mode():
            assert torch.equal(embedding.rows(ids), weight[ids])
            torch.testing.assert_close(embedding.logits(x), x @ weight.t(), atol=1e-4, rtol=1e-4)


def test_the_choice_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """By CPU and dtype; where a form cannot be used, the reason says so."""
    monkeypatch.setattr(linear, "packed_reason", lambda *_: "")  # not every CPU multiplies packed bfloat16
    choose_linear.cache_clear()
    monkeypatch.setattr(linear, "_intel", lambda: True)
    assert choose_linear("cpu", torch.float32)[0] == "transposed"
    assert choose_linear("cpu", torch.bfloat16)[0] == "packed"
    choose_linear.cache_clear()
    monkeypatch.setattr(linear, "_intel", lambda: False)
    assert choose_linear("cpu", torch.float32)[0] == "packed"
    choose_linear.cache_clear()
    monkeypatch.setattr(linear, "packed_reason", lambda *_: "no such operators")
    assert choose_linear("cpu", torch.float32) == ("plain", "no such operators")
    choose_linear.cache_clear()


def test_a_missing_operator_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private operators of torch may go; then the plain form is used and the start-up line tells why."""

    def gone(*_: object) -> None:
        raise AttributeError("_reorder_linear_weight")

    packed_reason.cache_clear()
    monkeypatch.setattr(linear, "PackedLinear", gone)
    assert "lacks the operators" in packed_reason("cpu", torch.float32)
    packed_reason.cache_clear()
    assert "not float16" in packed_reason("cpu", torch.float16).replace("torch.", "")
    assert "not cuda" in packed_reason("cuda", torch.float32)


@pytest.mark.parametrize("rows", [1, 9])
def test_the_norm_equals_torchs(rows: int) -> None:
    """In both dtypes."""
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn((rows, 33), generator=source), torch.rand(33, generator=source)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        expected = torch.nn.functional.rms_norm(x, (33,), weight, 1e-5)
        got = RMSNorm(weight.to(dtype), 1e-5)(x.to(dtype))
        torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
