"""Requests that no service can answer, with the status and the field that a right one names."""

import json
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CONTEXT = 2048  # of the service under test
VOCAB = 512

_USER = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class BadInput:
    """One request. ``param`` is what the error's param begins with; empty where no field is at fault."""

    name: str
    path: str
    body: bytes
    param: str
    status: int = 400


def _chat(name: str, param: str, status: int = 400, /, **fields: Any) -> BadInput:
    return BadInput(name, CHAT, _encoded({"model": "toy", "messages": _USER} | fields), param, status)


def _text(name: str, param: str, status: int = 400, /, **fields: Any) -> BadInput:
    return BadInput(name, TEXT, _encoded({"model": "toy", "prompt": "hi"} | fields), param, status)


def _raw(name: str, body: bytes, param: str = "", status: int = 400, path: str = CHAT) -> BadInput:
    return BadInput(name, path, body, param, status)


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in body.items() if value is not ...}).encode()


def _message(content: Any, role: Any = "user", **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more}]


_TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
_DEEP = b"[" * 100_000 + b"]" * 100_000

BAD_INPUT: tuple[BadInput, ...] = (
    # Not JSON, or not an object
    _raw("empty body", b""),
    _raw("cut JSON", b'{"model": "toy", "messages": [{"role": "user"'),
    _raw("JSON array", b"[]"),
    _raw("JSON string", b'"toy"'),
    _raw("JSON null", b"null"),
    _raw("two objects", b'{"model": "toy"}{"model": "toy"}'),
    _raw("binary", bytes(range(256))),
    _raw("UTF-16", '{"model": "toy"}'.encode("utf-16")),
    _raw("half a character", b'{"model": "toy", "messages": [{"role": "user", "content": "\xc3"}]}'),
    _raw("half a character in a prompt", b'{"model": "toy", "prompt": "\xe2\x82"}', path=TEXT),
    _raw("overlong UTF-8", b'{"model": "toy", "prompt": "\xc0\xaf"}', path=TEXT),
    _raw("NaN literal", b'{"model": "toy", "prompt": "hi", "temperature": NaN}', path=TEXT),
    _raw("Infinity literal", b'{"model": "toy", "prompt": "hi", "top_p": Infinity}', path=TEXT),
    _raw("lone surrogate", b'{"model": "toy", "prompt": "\\ud800"}', path=TEXT),
    _raw("lone surrogate in a message", b'{"model": "toy", "messages": [{"role": "user", "content": "a\\udfffb"}]}'),
    _raw("deep nesting", b'{"model": "toy", "messages": ' + _DEEP + b"}"),
    _raw("deep objects", b'{"a":' * 50_000),
    _raw(
        "a number of 100000 digits", b'{"model": "toy", "prompt": "hi", "seed": ' + b"9" * 100_000 + b"}", "", path=TEXT
    ),
    _raw(
        "more bytes than a body may have", b'{"model": "toy", "prompt": "' + b"a" * (4 * 2**20) + b'"}', "", 413, TEXT
    ),
    # Model
    _chat("model missing", "model", model=...),
    _chat("model null", "model", model=None),
    _chat("model a number", "model", model=7),
    _chat("model unknown", "model", 404, model="gpt-4"),
    _chat("model empty", "model", model=""),
    _chat("model very long", "model", 404, model="x" * 100_000),
    # Messages
    _chat("messages missing", "messages", messages=...),
    _chat("messages null", "messages", messages=None),
    _chat("messages empty", "messages", messages=[]),
    _chat("messages a string", "messages", messages="hi"),
    _chat("messages an object", "messages", messages={"role": "user", "content": "hi"}),
    _chat("message a string", "messages", messages=["hi"]),
    _chat("message empty", "messages", messages=[{}]),
    _chat("role unknown", "messages[0].role", messages=_message("hi", "robot")),
    _chat("role a number", "messages[0].role", messages=_message("hi", 1)),
    _chat("content null", "messages[0].content", messages=_message(None)),
    _chat("content a number", "messages[0].content", messages=_message(42)),
    _chat("content no parts", "messages[0].content", messages=_message([])),
    _chat(
        "content an image", "messages[0].content", messages=_message([{"type": "image_url", "image_url": {"url": "x"}}])
    ),
    _chat("content part without text", "messages[0].content", messages=_message([{"type": "text"}])),
    _chat("unknown field of a message", "messages[0]", messages=_message("hi", colour="red")),
    _chat("tool result", "messages", messages=_message("4", "tool", tool_call_id="1")),
    _chat("more messages than allowed", "messages", messages=_USER * 5000),
    _chat("messages longer than the context", "messages", messages=_message("x" * (CONTEXT + 45))),
    _chat("messages of 1.5 M characters", "messages", messages=_message("a" * 1_500_000)),
    _chat("messages of 1.5 M spaces", "messages", messages=_message(" " * 1_500_000)),
    # Prompt
    _text("prompt missing", "prompt", prompt=...),
    _text("prompt null", "prompt", prompt=None),
    _text("prompt a number", "prompt", prompt=5),
    _text("prompt an object", "prompt", prompt={"text": "hi"}),
    _text("prompt empty", "prompt", prompt=""),
    _text("prompt without ids", "prompt", prompt=[]),
    _text("prompt of an empty list", "prompt", prompt=[[]]),
    _text("prompt of two texts", "prompt", prompt=["", "a"]),
    _text("negative id", "prompt", prompt=[-1]),
    _text("id beyond the vocabulary", "prompt", prompt=[[VOCAB]]),
    _text("id of 32 bits", "prompt", prompt=[2147483648]),
    _text("id of 64 bits", "prompt", prompt=[2**63]),
    _text("id of 200 bits", "prompt", prompt=[2**200]),
    _text("id a float", "prompt", prompt=[1.5]),
    _text("id a boolean", "prompt", prompt=[True]),
    _text("ids and text", "prompt", prompt=[1, "a"]),
    _text("prompt longer than the context", "prompt", prompt="x" * (CONTEXT + 1)),
    _text("ids longer than the context", "prompt", prompt=[65] * 100_000),
    _text("prompt of 1.5 M characters", "prompt", prompt="a" * 1_500_000),
    # Numbers
    _text("max_tokens zero", "max_tokens", max_tokens=0),
    _text("max_tokens negative", "max_tokens", max_tokens=-1),
    _text("max_tokens a string", "max_tokens", max_tokens="7"),
    _text("max_tokens a float", "max_tokens", max_tokens=7.5),
    _text("max_tokens 2**63", "max_tokens", max_tokens=2**63),
    _text("max_tokens 10**30", "max_tokens", max_tokens=10**30),
    _text("max_tokens beyond the context", "max_tokens", max_tokens=CONTEXT),
    _chat("both maxima", "max_", max_tokens=5, max_completion_tokens=6),
    _text("min_tokens above max_tokens", "min_tokens", max_tokens=5, min_tokens=6),
    _text("n zero", "n", n=0),
    _text("n negative", "n", n=-1),
    _text("n above the cap", "n", n=9),
    _text("n 10**9", "n", n=10**9),
    _text("n a boolean", "n", n=True),
    _text("best_of above n", "best_of", best_of=4),
    _text("temperature a string", "temperature", temperature="hot"),
    _text("temperature negative", "temperature", temperature=-0.1),
    _text("temperature 1e308", "temperature", temperature=1e308),
    _text("top_p zero", "top_p", top_p=0),
    _text("top_p above one", "top_p", top_p=1.01),
    _text("top_k -2", "top_k", top_k=-2),
    _text("top_k 2**63", "top_k", top_k=2**63),
    _text("min_p above one", "min_p", min_p=2),
    _text("seed 2**64", "seed", seed=2**64),
    _text("seed a float", "seed", seed=1.5),
    _text("seed a string", "seed", seed="1"),
    # Stops
    _text("stop empty", "stop", stop=""),
    _text("stop a number", "stop", stop=3),
    _text("stop with a null", "stop", stop=["a", None]),
    _text("too many stops", "stop", stop=[str(number) for number in range(17)]),
    _text("stop too long", "stop", stop="x" * 1000),
    _text("stop id negative", "stop_token_ids", stop_token_ids=[-1]),
    _text("stop id beyond the vocabulary", "stop_token_ids", stop_token_ids=[VOCAB]),
    # Stream
    _text("stream a string", "stream", stream="yes"),
    _text("stream a number", "stream", stream=1),
    _text("stream_options without stream", "stream_options", stream_options={"include_usage": True}),
    _text("stream_options a list", "stream_options", stream=True, stream_options=[]),
    _text("stream_options unknown", "stream_options", stream=True, stream_options={"colour": 1}),
    _text("continuous usage", "stream_options", stream=True, stream_options={"continuous_usage_stats": True}),
    # Not supported, or unknown: refused by name
    _chat("tools", "tools", tools=[_TOOL]),
    _chat("tool_choice", "tool_choice", tool_choice="required"),
    _chat("logprobs", "logprobs", logprobs=True),
    _chat("top_logprobs", "top_logprobs", top_logprobs=5),
    _text("logprobs of a completion", "logprobs", logprobs=5),
    _text("echo", "echo", echo=True),
    _text("suffix", "suffix", suffix="end"),
    _chat("response_format", "response_format", response_format={"type": "json_object"}),
    _text("logit_bias", "logit_bias", logit_bias={"191222": -100}),
    _text("logit_bias with a word", "logit_bias", logit_bias={"AI": -100}),
    _text("frequency_penalty", "frequency_penalty", frequency_penalty=0.5),
    _text("priority", "priority", priority=-10),
    _text("structured_outputs", "structured_outputs", structured_outputs={"regex": "[\x00-\u2e7f]+"}),
    _text("guided_regex", "guided_regex", guided_regex="(a+)+b"),
    _text("transfer of one's own", "kv_transfer_params", kv_transfer_params={"remote_host": "10.0.0.1"}),
    _text("salt of one's own", "cache_salt", cache_salt="someone"),
    _text("unknown field", "colour", colour="red"),
)
