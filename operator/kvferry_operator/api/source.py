"""Where a model comes from: the forms that ``spec.model.source`` takes."""

import re
from typing import Literal

import msgspec

SourceKind = Literal["demo", "hub", "path", "toy"]

ACCEPTS = (
    "demo:NAME (demo:smollm2), a hub id such as org/name or hf://org/name@revision, "
    "a local folder or GGUF file (./model, ~/model, /models/model), or toy: for the test model"
)

_HUB = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,128}))?", re.ASCII)
_DEMO = re.compile(r"demo:([a-z0-9][a-z0-9.-]{0,95})", re.ASCII)
_TOY = re.compile(r"toy(?::([\w.,=-]{0,128}))?", re.ASCII)
MAX_SOURCE = 1024


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed source. ``name`` is the demo's name, the hub id, the path as written, or the toy's options."""

    kind: SourceKind
    name: str
    revision: str | None = None  # of a hub id: a branch, tag or commit

    def __str__(self) -> str:
        if self.kind == "path":
            return self.name
        if self.kind == "hub":
            return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "")
        return f"{self.kind}:{self.name}" if self.name else self.kind


def parse_source(text: str) -> ModelSource:
    """Parse a model source. Raises ``ValueError`` that says what is accepted."""
    if len(text) <= MAX_SOURCE and text.isprintable():
        if text.startswith(("./", "../", "/", "~/")) or text in (".", ".."):
            return ModelSource(kind="path", name=text)
        if match := _DEMO.fullmatch(text):
            return ModelSource(kind="demo", name=match[1])
        if match := _TOY.fullmatch(text):
            return ModelSource(kind="toy", name=match[1] or "")
        if (match := _HUB.fullmatch(text)) and ".." not in text:
            return ModelSource(kind="hub", name=match[1], revision=match[2])
    raise ValueError(f"not a model source; accepts {ACCEPTS}")
