"""What a pod says of itself: ``GET /internal/v1/info`` (JSON) and ``GET /internal/v1/text`` (msgpack)."""

import hashlib
from typing import Any, Literal

import msgspec

from kvferry_wire.layout import LayoutDescriptor
from kvferry_wire.limits import Limits

Role = Literal["prefill", "decode", "both"]


class PodPorts(msgspec.Struct, frozen=True, kw_only=True):
    """TCP ports; 0 where the pod does not listen."""

    http: int
    control: int
    data: int
    state: int


class PodInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    protocol_version: int
    incarnation: str  # hex
    epoch: int
    role: Role
    model: str  # served name
    model_digest: str
    text_digest: str  # of the text bundle
    compat_hash: str
    dtype: str
    threads: int
    block_size: int
    total_blocks: int
    max_model_len: int
    max_running: int
    token_budget: int
    layout: LayoutDescriptor
    ports: PodPorts
    transfer_backends: dict[str, str]  # name -> "ok", or why not
    attention_backends: dict[str, str]
    draining: bool  # takes nothing new; ends once nothing is left of these two
    legs: int = 0
    leases: int = 0  # at its engine's last heartbeat
    limits: Limits


class TextBundle(msgspec.Struct, frozen=True, kw_only=True):
    """All that rendering and tokenizing need; cached by ``digest`` in the router.

    Pods of one bundle answer alike, but need not have the same room: each says its own context length.
    """

    digest: str  # SHA-256 hex over the other fields
    tokenizer_json: bytes  # the file format of the `tokenizers` library
    chat_template: str | None  # Jinja source
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool  # a plain-text prompt gets the bos token in front
    vocab_size: int
    generation_defaults: dict[str, Any]  # temperature, top_p, top_k as the model's generation config says

    def digested(self) -> "TextBundle":
        """This bundle with its ``digest``."""
        rest = msgspec.msgpack.encode(msgspec.structs.replace(self, digest=""), order="deterministic")
        return msgspec.structs.replace(self, digest=hashlib.sha256(rest).hexdigest())


encode_json = msgspec.json.Encoder().encode
decode_info = msgspec.json.Decoder(PodInfo).decode
encode = msgspec.msgpack.Encoder().encode
decode_text = msgspec.msgpack.Decoder(TextBundle).decode
