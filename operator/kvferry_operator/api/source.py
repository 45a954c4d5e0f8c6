"""Where a model comes from: the forms that ``spec.model.source`` takes."""

import re
from typing import Literal

import msgspec

from kvferry_wire.urls import parse_url

SourceKind = Literal["demo", "hub", "web", "s3", "path", "toy", "pvc", "image"]

ACCEPTS = (
    "demo:NAME (demo:smollm2), a hub id such as org/name or hf://org/name@revision, "
    "http(s)://HOST/FOLDER/ or the address of a .gguf file, s3://BUCKET/PREFIX, "
    "a local folder or GGUF file (./model, ~/model, /models/model), pvc://CLAIM/PATH, image://REFERENCE, "
    "or toy: for the test model"
)

_HUB = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,128}))?", re.ASCII)
_DEMO = re.compile(r"demo:([a-z0-9][a-z0-9.-]{0,95})", re.ASCII)
_TOY = re.compile(r"toy(?::([\w.,=-]{0,128}))?", re.ASCII)
_PVC = re.compile(r"pvc://([a-z0-9][a-z0-9-]{0,62})(?:/([\w.-][\w./-]{0,511}))?", re.ASCII)
_IMAGE = re.compile(r"image://([A-Za-z0-9][\w./:@-]{0,511})", re.ASCII)
_S3 = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9_.!*()/+=,@:~-]*))?", re.ASCII)
_WEB = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?"
    r"/(?:(?:[A-Za-z0-9_.!$&()*+,;=:@~/-]|%[0-9A-Fa-f]{2})*(?:/|\.gguf(?:#sha256=[0-9a-f]{64})?))?",
    re.ASCII,
)
_PATH = re.compile(r"(?:\.|\.\.|~)?/.*|\.\.?")
MAX_SOURCE = 1024

# All forms in one, for the API server. `parse_source` also refuses `..` and what cannot be printed.
SOURCE_PATTERN = "^(" + "|".join(form.pattern for form in (_PATH, _DEMO, _TOY, _HUB, _WEB, _S3, _PVC, _IMAGE)) + ")$"


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed source.

    ``name`` is the demo's name, the hub id, the address or path as written, the toy's options, the bucket, the claim or
    the image.
    """

    kind: SourceKind
    name: str
    revision: str | None = None  # of a hub id: a branch, tag or commit
    inside: str | None = None  # of a claim or bucket: the model's place in it

    def __str__(self) -> str:
        if self.kind in ("path", "web"):
            return self.name
        if self.kind == "hub":
            return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "")
        if self.kind in ("pvc", "image", "s3"):
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
        if (match := _S3.fullmatch(text)) and ".." not in text:
            return ModelSource(kind="s3", name=match[1], inside=match[2] or None)
        if _WEB.fullmatch(text):
            try:
                parse_url(text)
            except ValueError as error:
                raise ValueError(f"{error}; accepts {ACCEPTS}") from None
            return ModelSource(kind="web", name=text)
        if (match := _HUB.fullmatch(text)) and ".." not in text:
            return ModelSource(kind="hub", name=match[1], revision=match[2])
    raise ValueError(f"not a model source; accepts {ACCEPTS}")
