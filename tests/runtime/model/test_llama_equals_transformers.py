"""Our decoder gives transformers' logits, however the tokens are chunked, batched and spread over blocks."""

import random
from pathlib import Path

import pytest
import torch

from kvferry_kernels.native.provide import Provided
from kvferry_runtime.layers import kernels
from kvferry_runtime.layers.kernels import choose_kernels
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.loader import LoadedModel, load_model
from kvferry_runtime.model.text import load_text_bundle
from kvferry_text.tokenizer import TextTokenizer
from tests.support.checkpoints import LLAMA3_ROPE, TINY_LLAMAS, TinyLlama, make_checkpoint, make_gguf
from tests.support.paged import PagedRun
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference, reference_for

TOLERANCE = 1e-3


@pytest.fixture(params=["native", "torch"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose operators compute: each test that names them runs with ours and with torch's."""
    use_operators(request.param, monkeypatch)
    return str(request.param)


def use_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where ours cannot be had."""
    reason = choose_kernels(torch.float32, env={}).reason
    if name == "native" and choose_kernels(torch.float32, env={}).library is None:
        pytest.skip(reason)
    monkeypatch.setenv("KVFERRY_KERNELS", name)


def make_ids(spec_vocab: int, length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(spec_vocab) for _ in range(length)]


@pytest.mark.parametrize("spec", TINY_LLAMAS, ids=lambda spec: spec.name)
def test_logits_equal_on_odd_shapes(spec: TinyLlama, tmp_path: Path, operators: str) -> None:
    """Odd vocabularies, head counts, head sizes, tied and untied, all kinds of rotary scaling."""
    path = make_checkpoint(tmp_path, spec)
    ids = make_ids(spec.vocab, 150)
    expected = Reference(path).logits(ids)
    model = load_model(path, "float32").model
    for chunks in ((), (1, 2, 3, 40), (149,)):
        torch.testing.assert_close(PagedRun(model).logits(ids, chunks), expected, atol=1e-4, rtol=1e-4)


def test_greedy_answers_pass_the_oracle(tmp_path: Path, operators: str) -> None:
    """Sequences decoded in one batch, each on its own scattered blocks, are what the reference picks."""
    path = make_checkpoint(tmp_path)
    reference = Reference(path)
    run = PagedRun(load_model(path, "float32").model)
    prompts = [make_ids(263, length, seed=length) for length in (1, 3, 4, 17, 40)]
    sequences = [run.sequence(prompt) for prompt in prompts]
    for _ in range(12):
        hidden = run.step([(sequence, len(sequence.ids) - sequence.done) for sequence in sequences])
        picked = run.model.logits(torch.stack([rows[-1] for rows in hidden])).argmax(-1)
        for sequence, token in zip(sequences, picked.tolist(), strict=True):
            sequence.ids.append(token)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert reference.judge_greedy(prompt, sequence.ids[len(prompt) :]) == []


def test_the_oracle_names_a_wrong_token(tmp_path: Path) -> None:
    """A token that is not the reference's pick is found at its index; those after it are judged given it."""
    path = make_checkpoint(tmp_path)
    reference = Reference(path)
    prompt = make_ids(263, 9)
    answer = reference.generate(prompt, 6)
    assert reference.judge_greedy(prompt, answer) == []
    wrong = [*answer[:2], (answer[2] + 1) % 263, *answer[3:]]
    assert reference.judge_greedy(prompt, wrong)[0].index == 2


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    """An index over several files is one checkpoint."""
    one, three = make_checkpoint(tmp_path / "one"), make_checkpoint(tmp_path / "three", shards=3)
    ids = make_ids(263, 20)
    logits = [PagedRun(load_model(path, "float32").model).logits(ids) for path in (one, three)]
    assert torch.equal(*logits)
    assert open_folder(one).digest != open_folder(three).digest


@pytest.mark.parametrize("spec", TINY_LLAMAS[:2], ids=lambda spec: spec.name)
def test_a_gguf_file_gives_the_same_model(spec: TinyLlama, tmp_path: Path) -> None:
    """The permutation that llama.cpp's converter applies to queries and keys is undone."""
    ids = make_ids(spec.vocab, 40)
    from_folder = load_model(make_checkpoint(tmp_path / "hf", spec), "float32").model
    from_gguf = load_model(make_gguf(tmp_path / "tiny.gguf", spec), "float32").model
    torch.testing.assert_close(PagedRun(from_gguf).logits(ids), PagedRun(from_folder).logits(ids), atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """The lower precision changes scores a little, and the cache is bfloat16 then."""
    path = make_checkpoint(tmp_path)
    ids = make_ids(263, 30)
    full, half = load_model(path, "float32").model, load_model(path, "bfloat16").model
    assert half.kv_groups()[0].dtype == "bfloat16"
    expected, got = PagedRun(full).logits(ids), PagedRun(half).logits(ids)
    assert (got - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_rotary_scaling_changes_the_model(tmp_path: Path) -> None:
    """The llama3 case above tests something: without scaling the logits are others."""
    plain = TinyLlama(rope={"rope_type": "default", "rope_theta": 500.0})
    ids = make_ids(263, 60)
    logits = [
        PagedRun(load_model(make_checkpoint(tmp_path / name, spec), "float32").model).logits(ids)
        for name, spec in (("plain", plain), ("scaled", TinyLlama(rope=LLAMA3_ROPE)))
    ]
    assert not torch.allclose(*logits, atol=1e-2)


@pytest.mark.parametrize("spec", TINY_LLAMAS[:3], ids=lambda spec: spec.name)
@pytest.mark.parametrize("attention", ["torch", "native"])
def test_operators_can_be_mixed(
    spec: TinyLlama, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our products under torch's attention, operator by operator; and both, which is one call a step."""
    use_operators("native", monkeypatch)
    path = make_checkpoint(tmp_path, spec)
    ids = make_ids(spec.vocab, 70)
    loaded = load_model(path, "float32", attention=attention)
    assert (loaded.kernels.name, loaded.attention) == ("native", attention)
    got = PagedRun(loaded.model).logits(ids, (3, 1, 40))
    torch.testing.assert_close(got, Reference(path).logits(ids), atol=1e-4, rtol=1e-4)


def test_kv_of_one_is_read_by_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill with torch's operators and decode with ours, and the other way round: the layout is one."""
    path = make_checkpoint(tmp_path)
    ids = make_ids(263, 60)
    expected = Reference(path).logits(ids)
    models = {}
    for name in ("torch", "native"):
        use_operators(name, monkeypatch)
        models[name] = load_model(path, "float32").model
    for first, second in (("torch", "native"), ("native", "torch")):
        run = PagedRun(models[first])
        sequence = run.sequence(ids)
        parts = run.step([(sequence, 45)])
        run.model = models[second]
        parts += [run.step([(sequence, 1)])[0] for _ in range(15)]
        torch.testing.assert_close(models[second].logits(torch.cat(parts)), expected, atol=1e-4, rtol=1e-4)


def test_our_logits_are_the_same_bits_however_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's scores do not depend on chunks or on what is computed beside it, to the last bit."""
    use_operators("native", monkeypatch)
    model = load_model(make_checkpoint(tmp_path), "float32").model
    ids = make_ids(263, 80)
    whole = PagedRun(model).logits(ids)
    assert torch.equal(PagedRun(model, seed=5).logits(ids, (1,) * 79), whole)
    run = PagedRun(model, seed=6)
    sequence, others = run.sequence(ids), [run.sequence(make_ids(263, 80, seed=seed)) for seed in (1, 2, 3)]
    parts = [run.step([(others[0], 2), (sequence, 4), *((other, 1) for other in others[1:])])[1] for _ in range(20)]
    assert torch.equal(torch.cat([model.logits(part) for part in parts]), whole)


def test_without_a_compiler_torch_computes_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library: the same model, and the reason among those that the start-up line shows."""
    monkeypatch.delenv("KVFERRY_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_provided", lambda: Provided(None, "no C++ compiler (c++) was found"))
    loaded = load_model(make_checkpoint(tmp_path), "float32")
    assert loaded.attention == "torch"
    assert "operators torch: no C++ compiler (c++) was found" in loaded.reasons
    monkeypatch.setenv("KVFERRY_KERNELS", "native")
    with pytest.raises(ModelError, match=r"KVFERRY_KERNELS: native given.*no C"):
        load_model(make_checkpoint(tmp_path / "again"), "float32")
    monkeypatch.setenv("KVFERRY_KERNELS", "fast")
    with pytest.raises(ModelError, match="'fast' given; one of auto, native, torch is accepted"):
        load_model(make_checkpoint(tmp_path / "wrong"), "float32")


def test_bfloat16_is_torchs_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our operators compute in float32."""
    monkeypatch.delenv("KVFERRY_KERNELS", raising=False)
    loaded = load_model(make_checkpoint(tmp_path), "bfloat16")
    assert loaded.kernels.name == "torch"
    assert "operators torch: the C++ operators compute in float32, not bfloat16" in loaded.reasons


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> LoadedModel:
    return load_model(demo_model, "float32")


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_equals_transformers_on_varied_prompts(demo: LoadedModel, demo_model: Path) -> None:
    """50 prompts of several languages, code, digits, emoji and whitespace: all logits within 1e-3."""
    reference = reference_for(demo_model)
    tokenizer = TextTokenizer(load_text_bundle(demo.folder))
    source = random.Random(0)
    worst = 0.0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, special=True, add_bos=False)
        chunks = (source.randrange(1, len(ids)),) if len(ids) > 1 else ()
        got = PagedRun(demo.model, block_size=16, blocks=64).logits(ids, chunks)
        worst = max(worst, float((got - reference.logits(ids)).abs().max()))
    assert len(PROMPTS) == 50
    assert worst < TOLERANCE


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_models_answers_pass_the_oracle(demo: LoadedModel, demo_model: Path) -> None:
    """Eight chat answers decoded as one batch are what transformers picks, token by token."""
    tokenizer = TextTokenizer(load_text_bundle(demo.folder))
    run = PagedRun(demo.model, block_size=16, blocks=128)
    chats = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS[:8]]
    prompts = [tokenizer.encode(chat, special=True, add_bos=False) for chat in chats]
    sequences = [run.sequence(prompt) for prompt in prompts]
    for _ in range(24):
        hidden = run.step([(sequence, len(sequence.ids) - sequence.done) for sequence in sequences])
        picked = demo.model.logits(torch.stack([rows[-1] for rows in hidden])).argmax(-1)
        for sequence, token in zip(sequences, picked.tolist(), strict=True):
            sequence.ids.append(token)
    reference = reference_for(demo_model)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert reference.judge_greedy(prompt, sequence.ids[len(prompt) :]) == []
