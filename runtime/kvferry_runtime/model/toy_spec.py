"""The toy model's name and knobs: ``toy`` or ``toy:vocab=512,ctx=4096,...``. No torch.

A whole service runs on it without any model file: its tokenizer has one id per byte.
"""

from typing import Literal

import msgspec

from kvferry_runtime.model.config import ModelConfig, RopeConfig
from kvferry_runtime.model.errors import ModelError

BOS_TOKEN = "<bos>"  # noqa: S105  (a token of text, no secret)
EOS_TOKEN = "<eos>"  # noqa: S105
BYTE_TOKENS = 256


class ToySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the toy model. Ids 0..255 are bytes, then bos, eos, and words that only decode."""

    vocab: int = 512  # at least 258
    ctx: int = 4096  # positions
    layers: int = 1  # layers, heads and dim only make the KV larger: 16 bytes * layers * heads * dim a token
    heads: int = 1
    dim: int = 1
    emit: Literal["text", "any"] = "text"  # what is picked: printable ASCII, or any byte
    eos_every: int = 0  # one pick in so many is end-of-sequence; 0 is never
    step_ms: float = 0.0  # sleep of each forward: a slow model for chaos tests

    @property
    def bos_token_id(self) -> int:
        """The first id behind the bytes."""
        return BYTE_TOKENS

    @property
    def eos_token_id(self) -> int:
        """The id behind bos."""
        return BYTE_TOKENS + 1

    @property
    def elements(self) -> int:
        """Integers of one slot's K."""
        return self.layers * self.heads * self.dim

    def emit_range(self) -> tuple[int, int]:
        """First id and number of the ids that candidates are drawn from."""
        return (32, 95) if self.emit == "text" else (0, BYTE_TOKENS)

    def model_config(self) -> ModelConfig:
        """The toy as the rest of the engine sees a model."""
        return ModelConfig(
            architecture="toy",
            vocab_size=self.vocab,
            hidden_size=1,
            intermediate_size=1,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.dim,
            max_model_len=self.ctx,
            norm_eps=0.0,
            rope=RopeConfig(theta=1.0),
            tied_embeddings=True,
            dtype="int64",
            bos_token_id=self.bos_token_id,
            eos_token_ids=(self.eos_token_id,),
        )


_LOWEST = {"vocab": BYTE_TOKENS + 2, "ctx": 2, "layers": 1, "heads": 1, "dim": 1, "eos_every": 0, "step_ms": 0}
_HIGHEST = {
    "vocab": 2**20,
    "ctx": 2**20,
    "layers": 256,
    "heads": 256,
    "dim": 1024,
    "eos_every": 2**31,
    "step_ms": 600_000,
}


def is_toy_name(name: str) -> bool:
    """Whether a model's name means the toy model."""
    return name == "toy" or name.startswith("toy:")


def parse_toy_name(name: str) -> ToySpec:
    """Read ``toy`` or ``toy:key=value,...``.

    Raises:
        ModelError: an unknown key, a value of the wrong type, or one out of its range.
    """
    text = name.removeprefix("toy").removeprefix(":")
    fields: dict[str, str] = {}
    for part in text.split(",") if text else []:
        key, equals, value = part.partition("=")
        if not equals or key not in ToySpec.__struct_fields__:
            raise ModelError(
                f"model {name!r}: {part!r} given; accepted: key=value with {', '.join(ToySpec.__struct_fields__)}"
            )
        fields[key] = value
    try:
        spec = msgspec.convert(fields, ToySpec, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"model {name!r}: {error}") from error
    for key, low in _LOWEST.items():
        value_given = getattr(spec, key)
        if not low <= value_given <= _HIGHEST[key]:
            raise ModelError(f"model {name!r}: {key} is {value_given}; {low}..{_HIGHEST[key]} are accepted")
    return spec
