"""Log lines: JSON with the request's ids, keys blanked."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvferry_service import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A captured log; the root logger is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_json_line_has_ids_and_fields(stream: io.StringIO) -> None:
    """Each line is one JSON object with the ids that the task was bound to."""
    logs.configure("router", stream=stream)

    async def work() -> None:
        logs.bind_request("client-1", "int-1")
        logs.get_logger("x").info("done\nforged", extra=logs.fields(blocks=3))

    asyncio.run(work())
    logs.get_logger("x").info("outside")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["request_id"] == "client-1"
    assert first["internal_id"] == "int-1"
    assert first["blocks"] == 3
    assert first["process"] == "router"
    assert "request_id" not in second


def test_secrets_are_blanked_also_in_tracebacks(stream: io.StringIO) -> None:
    """Registered keys and bearer tokens never reach the stream."""
    logs.configure("pod", stream=stream, json_lines=True)
    logs.redact(["deadbeefdeadbeef"])
    try:
        raise ValueError("key deadbeefdeadbeef")
    except ValueError:
        logs.get_logger("x").exception("Authorization: Bearer abc123")
    assert "deadbeef" not in stream.getvalue()
    assert "abc123" not in stream.getvalue()
    assert "ValueError" in stream.getvalue()


def test_a_human_line_is_one_line(stream: io.StringIO) -> None:
    """A peer's line break cannot forge a second event."""
    logs.configure("pod", stream=stream, json_lines=False, level="warning")
    logs.get_logger("x").warning("a\nb", extra=logs.fields(n=1))
    logs.get_logger("x").info("hidden")
    assert len(stream.getvalue().splitlines()) == 1
    assert "n=1" in stream.getvalue()
