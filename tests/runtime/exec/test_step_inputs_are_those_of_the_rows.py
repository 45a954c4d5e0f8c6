"""Plans as tensors, against the attention back end's own naive builder."""

import random

import torch

from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.core.plan import Pick, Row, StepPlan
from kvferry_runtime.exec.budget import default_token_budget, weights_per_token
from kvferry_runtime.exec.inputs import build_inputs
from kvferry_runtime.model.config import ModelConfig, RopeConfig
from kvferry_wire.leg import Sampling


def make_row(number: int, first: int, count: int, block_size: int, picks: int, source: random.Random) -> Row:
    blocks = -(-(first + count) // block_size) + source.randrange(2)
    pick = Pick(0, first + count, 0, Sampling(seed=0, max_tokens=1))
    return Row(
        number,
        first,
        tuple(source.randrange(1000) for _ in range(count)),
        tuple(source.sample(range(1, 500), blocks)),
        (pick,) * picks,
    )


def test_batches_equal_those_of_the_naive_builder() -> None:
    """Random mixes of decodes, chunks and whole prompts, tables longer than needed included."""
    source = random.Random(4)
    for _ in range(100):
        block_size = source.choice([1, 3, 16])
        rows = tuple(
            make_row(n, source.choice([0, source.randrange(70)]), source.choice([1, 1, 5, 33]), block_size, 1, source)
            for n in range(source.randrange(1, 9))
        )
        inputs = build_inputs(StepPlan(1, rows), block_size)
        naive = AttentionBatch.build(
            [len(row.token_ids) for row in rows],
            [row.first + len(row.token_ids) for row in rows],
            [row.table for row in rows],
            block_size,
        )
        for name in ("query_starts", "context_lens", "block_tables", "slots", "open_blocks"):
            assert torch.equal(getattr(inputs.batch, name), getattr(naive, name)), name
        assert inputs.token_ids.tolist() == [token for row in rows for token in row.token_ids]
        assert inputs.positions.tolist() == [row.first + i for row in rows for i in range(len(row.token_ids))]


def test_logits_are_asked_for_rows_that_pick_alone() -> None:
    """A partial chunk has none; a root with three picks has one row of logits for all of them."""
    source = random.Random(5)
    rows = (make_row(1, 0, 4, 4, 0, source), make_row(2, 0, 3, 4, 3, source), make_row(3, 9, 1, 4, 1, source))
    inputs = build_inputs(StepPlan(1, rows), 4)
    assert inputs.last_tokens.tolist() == [6, 7]
    assert inputs.logits_rows == (0, 0, 0, 1)
    assert len(inputs.picks) == 4
    nothing = build_inputs(StepPlan(1, rows[:1]), 4)
    assert nothing.last_tokens.tolist() == []


def test_the_default_budget_keeps_a_step_under_half_a_second() -> None:
    """By the stated rule: 50 GFLOP/s a thread, 100 with AVX-512, multiples of 32 between 32 and 2048."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        max_model_len=8192,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e5),
        tied_embeddings=True,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert weights_per_token(config) == 106_168_320
    assert [default_token_budget(config, threads, frozenset({"avx2"})) for threads in (1, 2, 64)] == [96, 224, 2048]
    assert [default_token_budget(config, threads, frozenset({"avx512f"})) for threads in (1, 2)] == [224, 448]
