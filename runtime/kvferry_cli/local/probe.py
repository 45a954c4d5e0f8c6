"""One readiness probe: a GET over a new connection, with a deadline for the whole of it."""

import asyncio

import msgspec

from kvferry_cli.local.ports import HOST

MAX_ANSWER_BYTES = 8 * 1024
MAX_REASON_CHARS = 300


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """``live``: an HTTP answer came; ``ready``: it was 200; ``reason``: why not."""

    live: bool
    ready: bool
    reason: str


async def probe(port: int, path: str, timeout_s: float) -> ProbeResult:
    """Ask a local pod whether it is ready. Never raises for what the pod does."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _get(port, path)
    except ConnectionRefusedError:
        return ProbeResult(live=False, ready=False, reason="not listening yet")
    except TimeoutError:
        return ProbeResult(live=False, ready=False, reason=f"no answer from {path} within {timeout_s:g} s")
    except OSError as error:
        return ProbeResult(live=False, ready=False, reason=f"{path}: {error.strerror or error}")
    return interpret(answer)


def interpret(answer: bytes) -> ProbeResult:
    """What an HTTP answer says."""
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = head.split(b"\r\n", 1)[0].split()
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        return ProbeResult(live=False, ready=False, reason="what listens on its port does not speak HTTP")
    status = int(parts[1])
    if status == 200:
        return ProbeResult(live=True, ready=True, reason="")
    return ProbeResult(live=True, ready=False, reason=_reason(body) or f"status {status}")


def _reason(body: bytes) -> str:
    try:
        value = msgspec.json.decode(body, type=dict[str, object]).get("reason", "")
    except msgspec.DecodeError:
        return ""
    return str(value)[:MAX_REASON_CHARS]


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < MAX_ANSWER_BYTES and (data := await reader.read(MAX_ANSWER_BYTES)):
            answer += data
        return answer
    finally:
        writer.transport.abort()
