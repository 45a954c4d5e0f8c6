"""Judges answers by one monolithic pass: the same weights, one sequence, nothing ferried, cached or batched.

An answer is text. Its tokens are guessed by the tokenizer and judged in one pass; from the first one on that the
reference would not pick, it walks along the text: at each position it takes the token that it would pick, or one within
the margin of it, whose text goes on as the answer does. Where no such token is left, the answer is wrong.
"""

from typing import TYPE_CHECKING

import msgspec

from kvferry_cli.bench.records import Trace

if TYPE_CHECKING:
    from torch import Tensor

# Scores of equal sequences differ by less than this between batch sizes; picks this close may go either way.
MARGINS = {"int64": 0.0, "float32": 1e-3, "bfloat16": 0.25}
CHUNK = 512  # prompt tokens of one step
BLOCK = 16
MAX_CANDIDATES = 8
MAX_STEPS = 4  # times the answer's tokens, before a walk among near ties is given up


class _Branch(msgspec.Struct, frozen=True):
    """Picks that explain the answer so far."""

    ids: tuple[int, ...]


class Reference:
    """The model, in this process.

    Args:
        model: as the engines take it.
        dtype: as the engines compute.
        longest: tokens of the longest sequence that is judged.

    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, model: str, dtype: str, longest: int) -> None:
        from kvferry_runtime.exec.kv_memory import KVMemory
        from kvferry_runtime.model.folder import open_folder
        from kvferry_runtime.model.loader import load_model
        from kvferry_runtime.model.text import load_text_bundle
        from kvferry_text.tokenizer import TextTokenizer

        folder = open_folder(model)
        self._model = load_model(folder, "auto" if dtype == "int64" else dtype).model
        self._tokenizer = TextTokenizer(load_text_bundle(folder))
        self._blocks = -(-longest // BLOCK)
        self._memory = KVMemory(self._model.kv_groups(), BLOCK, self._blocks + 1)
        self._margin = MARGINS[dtype]
        self._ids: list[int] = []  # whose KV is in the memory

    def why_wrong(self, trace: Trace) -> str:
        """Empty for a right answer, also for a right beginning of one that was cut; else what is wrong."""
        guessed = self._guessed(trace)
        wrong = self._walk(trace, guessed)
        return self._walk(trace, ()) if wrong and guessed else wrong

    def _guessed(self, trace: Trace) -> tuple[int, ...]:
        """The tokens that the answer's text has by itself, up to the first one that is no pick of the reference."""
        prompt = trace.request.prompt_ids
        ids = self._tokenizer.encode(trace.text, special=False, add_bos=False)[: trace.request.answer_tokens]
        if not ids:
            return ()
        scores = self._scores([*prompt, *ids[:-1]], first=len(prompt) - 1)
        best = scores.max(dim=-1).values
        good = 0
        while good < len(ids) and float(best[good] - scores[good][ids[good]]) <= self._margin:
            good += 1
        found = tuple(ids[:good])
        return found if self._fits(trace, found) else ()

    def _walk(self, trace: Trace, begun: tuple[int, ...]) -> str:
        """Why no picks of the reference explain the answer from these on; empty when some do."""
        prompt = trace.request.prompt_ids
        tokens = trace.request.answer_tokens
        open_branches = [_Branch(begun)]
        furthest = 0
        for _ in range(MAX_STEPS * tokens + 1):
            if not open_branches:
                return f"no pick of the reference goes on as the answer does after {furthest} tokens"
            ids = open_branches.pop().ids
            furthest = max(furthest, len(ids))
            if self._explains(trace, ids):
                return ""
            if len(ids) < tokens:
                candidates = self._candidates([*prompt, *ids])
                grown = [_Branch((*ids, token)) for token in candidates]
                # The best candidate is tried first.
                open_branches += [branch for branch in reversed(grown) if self._fits(trace, branch.ids)]
        return f"more near ties than can be followed, after {furthest} tokens"

    def _explains(self, trace: Trace, ids: tuple[int, ...]) -> bool:
        if trace.complete:
            return len(ids) == trace.request.answer_tokens and self._text(trace, ids, whole=True) == trace.text
        return self._text(trace, ids, whole=False).startswith(trace.text)

    def _fits(self, trace: Trace, ids: tuple[int, ...]) -> bool:
        text = self._text(trace, ids, whole=False)
        return trace.text.startswith(text) or (not trace.complete and text.startswith(trace.text))

    def _text(self, trace: Trace, ids: tuple[int, ...], *, whole: bool) -> str:
        detokenizer = self._tokenizer.detokenizer(trace.request.prompt_ids)
        text = "".join(map(detokenizer.push, ids))
        return text + detokenizer.flush() if whole else text

    def _candidates(self, ids: list[int]) -> list[int]:
        """Tokens within the margin of the best one after these ids, best first."""
        scores = self._scores(ids, first=len(ids) - 1)[0]
        best = scores.topk(min(MAX_CANDIDATES, len(scores)))
        return [
            int(token)
            for token, score in zip(best.indices, best.values, strict=True)
            if float(best.values[0] - score) <= self._margin
        ]

    def _scores(self, ids: list[int], *, first: int) -> "Tensor":
        """Scores after each position from ``first`` on. What the memory holds of earlier ids is not computed again."""
        import torch

        from kvferry_runtime.attention.backend import AttentionBatch

        known = 0
        while known < min(len(self._ids), first) and self._ids[known] == ids[known]:
            known += 1
        table = list(range(1, self._blocks + 1))
        kept: list[Tensor] = []
        with torch.inference_mode():
            while known < len(ids):
                end = min(known + CHUNK, len(ids))
                batch = AttentionBatch.build([end - known], [end], [table], BLOCK)
                positions = torch.arange(known, end)
                hidden = self._model.forward(torch.tensor(ids[known:end]), positions, self._memory, batch)
                kept.append(hidden[max(0, first - known) :])
                known = end
            self._ids = list(ids)
            return self._model.logits(torch.cat(kept))
