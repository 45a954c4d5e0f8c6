"""Where a model comes from: the forms that ``spec.model.source`` takes."""

import re
from typing import Literal

import msgspec

SourceKind = Literal["demo", "hub", "path", "toy", "pvc", "image"]

ACCEPTS = (
    "demo:NAME (demo:smollm2), a hub id such as org/name or hf://org/name@revision, "
    "a local folder or GGUF file (./model, ~/model, /models/model), pvc://CLAIM/PATH, image://REFERENCE, "
    "or toy: for the test model"
)

_HUB = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,128}))?", re.ASCII)
_DEMO = re.compile(r"demo:([a-z0-9][a-z0-9.-]{0,95})", re.ASCII)
_TOY = re.compile(r"toy(?::([\w.,=-]{0,128}))?", re.ASCII)
_PVC = re.compile(r"pvc://([a-z0-9][a-z0-9-]{0,62})(?:/([\w.-][\w./-]{0,511}))?", re.ASCII)
_IMAGE = re.compile(r"image://([A-Za-z0-9][\w./:@-]{0,511})", re.ASCII)
_PATH = re.compile(r"(?:\.|\.\.|~)?/.*|\.\.?")
MAX_SOURCE = 1024

# All forms in one, for the API server. `parse_source` also refuses `..` and what cannot be printed.
SOURCE_PATTERN = "^(" + "|".join(form.pattern for form in (_PATH, _DEMO, _TOY, _HUB, _PVC, _IMAGE)) + ")$"


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed source.

    ``name`` is the demo's name, the hub id, the path as written, the toy's options, the claim or the image.
    """

    kind: SourceKind
    name: str
    revision: str | None = None  # of a hub id: a branch, tag or commit
    inside: str | None = None  # of a claim: the model's place in the volume

    def __str__(self) -> str:
        if self.kind == "path":
            return self.name
        if self.kind == "hub":
            return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "")
        if self.kind in ("pvc", "image"):
            return f"{self.kind}://{self.name}" + (f"/{self.inside}" if self.inside else "")
        return f"{self.kind}:{self.name}" if self.name else self.kind


def parse_source(text: str) -> ModelSource:
    """Parse a model source. Raises ``ValueError`` that says what is accepted."""
    if len(text) <= MAX_SOURCE and text.isprintable():
        if _PATH.fullmatch(text):
            return ModelSource(kind="path", name=text)
        if match := _DEMO.fullmatch(text):
            return ModelSource(kind="demo", name=match[1])
        if match := _TOY.fullmatch(text):
            return ModelSource(kind="toy", name=match[1] or "")
        if (match := _PVC.fullmatch(text)) and not match[1].endswith("-") and ".." not in text:
            return ModelSource(kind="pvc", name=match[1], inside=match[2])
        if match := _IMAGE.fullmatch(text):
            return ModelSource(kind="image", name=match[1])
        if (match := _HUB.fullmatch(text)) and ".." not in text:
            return ModelSource(kind="hub", name=match[1], revision=match[2])
    raise ValueError(f"not a model source; accepts {ACCEPTS}")
