"""The teacher-forced oracle: one float32 pass of transformers over prompt and answer judges every token of the answer.

A greedy pick must be the reference's argmax at its position, given the prompt and the answer's own tokens before it.
Batch sizes and chunks change the last bits of the logits, so a pick within ``MARGIN`` of the best may go either way.
"""

import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry_runtime.model.folder import open_folder

MARGIN = 1e-3


@dataclass(frozen=True)
class Violation:
    """A token that the reference would not have picked."""

    index: int  # in the answer
    picked: int
    best: int
    margin: float  # logit of the best minus logit of the picked one


class Reference:
    """transformers' model of the same files, in float32."""

    def __init__(self, path: Path) -> None:
        self._model = _load(Path(path))

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Scores after each position: float32 [len(ids), vocab]."""
        with torch.inference_mode():
            out: Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return out

    def judge_greedy(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[Violation]:
        """All tokens of a greedy answer that are not the reference's pick; empty when the answer is right."""
        return self.judge(prompt_ids, answer_ids, lambda _, row: row)

    def judge(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], scores: Callable[[int, Tensor], Tensor]
    ) -> list[Violation]:
        """As ``judge_greedy`` for any pick that is an argmax.

        Args:
            scores: from the position that is picked (the prompt has 0 .. len - 1) and the logits [vocab] to what the
                argmax is taken of, for instance logits / T + noise.
        """
        prompt, answer = list(prompt_ids), list(answer_ids)
        if not answer:
            return []
        rows = self.logits(prompt + answer[:-1])[len(prompt) - 1 :]
        found: list[Violation] = []
        for index, (picked, row) in enumerate(zip(answer, rows, strict=True)):
            judged = scores(len(prompt) + index, row)
            best = int(judged.argmax())
            margin = float(judged[best] - judged[picked])
            if margin > MARGIN:
                found.append(Violation(index, picked, best, margin))
        return found

    def generate(self, prompt_ids: Sequence[int], tokens: int) -> list[int]:
        """transformers' own greedy continuation, with its cache; for benchmarks and as a second opinion."""
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor([list(prompt_ids)]), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        ids: list[int] = out[0, len(prompt_ids) :].tolist()
        return ids


@functools.cache
def reference_for(path: Path) -> Reference:
    """The reference of a model, loaded once per test process."""
    return Reference(path)


def _load(path: Path) -> Any:
    folder = open_folder(path)
    source = _converted(folder.path, folder.digest) if folder.gguf is not None else folder.path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations are not ours to fail on
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.eval()


def _converted(gguf: Path, digest: str) -> Path:
    """The GGUF file as transformers' own GGUF loader reads it, kept as safetensors: the loader takes half a minute."""
    root = Path(os.environ.get("KVFERRY_TEST_CACHE", Path(tempfile.gettempdir()) / f"kvferry-reference-{os.getuid()}"))
    target = root / digest
    if (target / "config.json").is_file():
        return target
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    scratch = Path(tempfile.mkdtemp(dir=root))
    try:
        _save(model, scratch)
        tokenizer.save_pretrained(scratch)
        scratch.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(scratch, ignore_errors=True)
        if not (target / "config.json").is_file():
            raise
    return target


def converted_folder(path: Path) -> Path:
    """Where the converted copy of a GGUF model lies, tokenizer files included; made when it is not there yet."""
    folder = open_folder(path)
    assert folder.gguf is not None, f"{path} is no GGUF model"
    return _converted(folder.path, folder.digest)


def _save(model: Any, folder: Path) -> None:
    """Write the dequantized weights; transformers refuses to, because it still calls the model quantized."""
    from safetensors.torch import save_file

    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
