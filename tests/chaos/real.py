"""The tokens of a real model's answers, judged after the run by transformers, which got only prompts and texts."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.text import load_text_bundle
from kvferry_text.bundle import TextTools, load_text
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.chaos.asked import Record
from tests.support.reference import Reference, reference_for

TOKENS = 64  # at least as many as any answer has


class TextJudge:
    """Says of each text whether the model says it. What was judged once is not judged again."""

    def __init__(self, folder: Path) -> None:
        self._tools: TextTools = load_text(load_text_bundle(open_folder(folder)), DEFAULT_LIMITS)
        self._reference: Reference = reference_for(folder)
        self._right: dict[str, list[str]] = {}  # prompt -> texts

    def fault(self, prompt: str, text: str) -> str:
        """Empty when the text is the model's answer to the prompt, or a beginning of it."""
        right = self._right.setdefault(prompt, [])
        if any(known.startswith(text) for known in right):
            return ""
        tokenizer, bundle = self._tools.tokenizer, self._tools.bundle
        prompt_ids = tokenizer.encode(prompt, special=True, add_bos=bundle.add_bos)
        violations = self._reference.judge_greedy(prompt_ids, tokenizer.encode(text, special=False, add_bos=False))
        if violations:
            said = self._reference.generate(prompt_ids, TOKENS)
            ending = [index for index, token in enumerate(said) if token in bundle.eos_token_ids]
            if not tokenizer.decode(said[: ending[0]] if ending else said).startswith(text):
                return f"{prompt!r}: {text!r}: {violations[:3]}"
        right.append(text)
        return ""


def judge_texts(folder: Path, records: Sequence[Record]) -> list[Record]:
    """The records, with what the model would not have said marked as wrong."""
    judge = TextJudge(folder)
    longest_first = sorted(records, key=lambda each: -len(each.text))
    faults = {
        (each.client, each.number): judge.fault(each.prompt, each.text)
        for each in longest_first
        if each.text and not each.wrong
    }
    return [
        msgspec.structs.replace(each, wrong=fault, whole=False)
        if (fault := faults.get((each.client, each.number), ""))
        else each
        for each in records
    ]
