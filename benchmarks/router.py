"""What the router adds: latency and requests per second through it, beside the same client straight to a pod.

Both sides run in one go, against the same pod process. Two kinds of pod:

- ``fake``: answers every leg with frames made beforehand, so what is measured is the router itself;
- ``toy``: ``python -m kvferry_runtime.server --model toy``, so what is measured is what a user of a real pod sees.

    .venv/bin/python benchmarks/router.py [--pod fake|toy] [--seconds 3] [--concurrency 1,16,64]

Prints one line per case: requests/s, p50 and p99 of the whole answer (or, streamed, of the first byte), the router's
CPU time per request, and what the router adds at p50.
"""

import argparse
import asyncio
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import psutil
import uvloop

from kvferry_service.key_files import create_keys, load_keys
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.frames import End, Tokens, encode_frame
from kvferry_wire.leg import Leg
from kvferry_wire.limits import Limits
from kvferry_wire.pod import PodInfo, PodPorts, encode, encode_json

MODEL = "toy"
PROMPT = "x" * 600  # bytes, and for the toy tokens
CHUNKS = 64  # of a streamed answer
TOKENS = 16  # of an answer in one piece


# ---- the fake pod ------------------------------------------------------------------------------------------------


def _respond(body: bytes, content_type: str = "application/octet-stream", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _chunked(parts: list[bytes], content_type: str) -> list[bytes]:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts]
    chunks[0] = head + chunks[0]
    chunks[-1] += b"0\r\n\r\n"
    return chunks


class FakePod:
    """Answers made beforehand: as frames to the router, as HTTP to a client that comes straight."""

    def __init__(self, keys_dir: Path, port: int) -> None:
        from kvferry_runtime.model.text_toy import toy_text
        from kvferry_runtime.model.toy_spec import ToySpec

        load_keys(keys_dir, need_kv=False)
        bundle = toy_text(ToySpec())
        event = b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"toy","choices":[{"index":0,'
        events = [
            event + f'"text":"{i:04d}","logprobs":null,"finish_reason":null}}]}}\n\n'.encode() for i in range(CHUNKS)
        ]
        whole = json.dumps(
            {"id": "cmpl-0", "choices": [{"index": 0, "text": "x" * 300, "finish_reason": "stop"}]}
        ).encode()
        last = b"data: [DONE]\n\n"
        tokens = [encode_frame(Tokens(choice=0, ids=(65,), data=data, chars=4)) for data in events]
        end = encode_frame(_end(last, CHUNKS))
        silent = encode_frame(Tokens(choice=0, ids=(65,) * TOKENS, data=b""))
        self.leg_stream = _chunked([*tokens, end], "application/x-kvferry-frames")
        self.leg_whole = _chunked([silent + encode_frame(_end(whole, TOKENS))], "application/x-kvferry-frames")
        self.straight_stream = _chunked([*events, last], "text/event-stream")
        self.straight_whole = [_respond(whole, "application/json")]
        self.routes = {
            b"/readyz": [_respond(b'{"ready": true}', "application/json")],
            b"/internal/v1/info": [_respond(_info(bundle.digest, port), "application/json")],
            b"/internal/v1/text": [_respond(encode(bundle))],
        }
        self.decode = msgspec.msgpack.Decoder(Leg).decode

    def answer(self, path: bytes, body: bytes) -> list[bytes]:
        """The writes that answer one request."""
        if path == b"/internal/v1/generate":
            return self.leg_stream if self.decode(body).format.stream else self.leg_whole
        if path == b"/v1/completions":
            return self.straight_stream if json.loads(body).get("stream") else self.straight_whole
        return self.routes.get(path, [_respond(b"", status="404 Not Found")])


def _end(data: bytes, tokens: int) -> End:
    return End(data=data, finish=("stop",), completion_tokens=tokens, cached_tokens=0)


def _info(text_digest: str, port: int) -> bytes:
    from kvferry_wire.layout import BLOCK_ORDER, KVGroup, LayoutDescriptor

    group = KVGroup(name="full", layers=1, kv_heads=1, head_dim=1, dtype="int64")
    return encode_json(
        PodInfo(
            version="0",
            protocol_version=PROTOCOL_VERSION,
            incarnation="00" * 16,
            epoch=1,
            role="both",
            model=MODEL,
            model_digest="m",
            text_digest=text_digest,
            compat_hash="c",
            dtype="int64",
            threads=1,
            block_size=16,
            total_blocks=10**6,
            max_model_len=4096,
            max_running=1024,
            token_budget=2048,
            layout=LayoutDescriptor(block_size=16, tensor_parallel=1, order=BLOCK_ORDER, groups=(group,)),
            ports=PodPorts(http=port, control=0, data=0, state=0),
            transfer_backends={},
            attention_backends={},
            draining=False,
            limits=Limits(),
        )
    )


class _PodProtocol(asyncio.Protocol):
    def __init__(self, pod: FakePod) -> None:
        self._pod = pod
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            for part in self._pod.answer(head.split(b" ", 2)[1], body):
                self._transport.write(part)


async def _serve_fake(keys_dir: Path, port: int) -> None:
    pod = FakePod(keys_dir, port)
    server = await asyncio.get_running_loop().create_server(lambda: _PodProtocol(pod), "127.0.0.1", port)
    await server.serve_forever()


# ---- the client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One case's measurements; latencies in seconds, sorted."""

    requests: int
    seconds: float
    whole: list[float]
    first: list[float]
    cpu_s: float  # of the router


class _Client(asyncio.Protocol):
    """One keep-alive connection that sends the same request again and again until told to stop."""

    def __init__(self, request: bytes, until: float, done: asyncio.Future[None]) -> None:
        self._request = request
        self._until = until
        self._done = done
        self._buffer = b""
        self._first = 0.0
        self.whole: list[float] = []
        self.first: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._begun = time.perf_counter()
        self._first = 0.0
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._first:
            self._first = now
        self._buffer += data
        if not self._complete():
            return
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(RuntimeError(self._buffer[:300].decode("utf-8", "replace")))
            return
        self._buffer = b""
        self.whole.append(now - self._begun)
        self.first.append(self._first - self._begun)
        if now < self._until:
            self._send()
        else:
            self._transport.close()
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"the connection was lost: {exc}"))

    def _complete(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._buffer[:end].lower()
        if b"transfer-encoding: chunked" in head:
            return self._buffer.endswith(b"\r\n0\r\n\r\n")
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        return len(self._buffer) >= end + 4 + length


async def _load(port: int, request: bytes, concurrency: int, seconds: float) -> tuple[list[float], list[float], float]:
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    clients, waits = [], []
    for _ in range(concurrency):
        done: asyncio.Future[None] = loop.create_future()
        _, client = await loop.create_connection(
            lambda done=done: _Client(request, begun + seconds, done), "127.0.0.1", port
        )
        clients.append(client)
        waits.append(done)
    await asyncio.gather(*waits)
    spent = time.perf_counter() - begun
    return sorted(x for c in clients for x in c.whole), sorted(x for c in clients for x in c.first), spent


def _request(body: dict[str, object], bearer: str) -> bytes:
    """The same bytes for both sides: a pod asks for the service's key, the router of this run for none."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bearer}\r\nContent-Length: {len(raw)}"
    return head.encode() + b"\r\n\r\n" + raw


def _measure(port: int, request: bytes, concurrency: int, seconds: float, router: psutil.Process) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_load(port, request, concurrency, min(0.5, seconds)))  # warm
        before = sum(router.cpu_times()[:2])
        whole, first, spent = runner.run(_load(port, request, concurrency, seconds))
        cpu = sum(router.cpu_times()[:2]) - before
    return Result(len(whole), spent, whole, first, cpu)


def _at(values: list[float], share: float) -> float:
    """A quantile, in milliseconds."""
    return 1000 * values[min(len(values) - 1, int(share * len(values)))]


# ---- the run -----------------------------------------------------------------------------------------------------


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_ready(port: int, log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as response:
                if response.status == 200:
                    return
        except OSError:
            pass  # nothing listens yet
        time.sleep(0.1)
    raise SystemExit(f"nothing is ready on port {port}:\n{log.read_text()[-2000:]}")


def _start(folder: Path, pod: str, pod_port: int, state_port: int, router_port: int) -> list[subprocess.Popen[bytes]]:
    keys = folder / "keys"
    create_keys(keys)
    pods = [{"name": "pod", "role": "both", "host": "127.0.0.1", "http": pod_port, "state": state_port}]
    (folder / "pods.json").write_text(json.dumps({"pods": pods}))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if pod == "fake":
        argv = [sys.executable, __file__, "--serve-fake", str(keys), "--port", str(pod_port)]
    else:
        argv = [sys.executable, "-m", "kvferry_runtime.server", "--model", "toy", "--role", "both"]
        argv += ["--keys-dir", str(keys), "--port", str(pod_port), "--state-port", str(state_port)]
    router = [sys.executable, "-m", "kvferry_router", "--service-name", "bench", "--model-name", MODEL]
    router += ["--pods-file", str(folder / "pods.json"), "--keys-dir", str(keys), "--port", str(router_port)]
    router += ["--auth", "none"]
    with (folder / "log").open("ab") as log:
        return [subprocess.Popen(each, env=env, stdout=log, stderr=log) for each in (argv, router)]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pod", choices=("fake", "toy"), default="fake")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--serve-fake", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_fake is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_fake(args.serve_fake, args.port))
        return
    with tempfile.TemporaryDirectory(prefix=f"bench-{secrets.token_hex(2)}-") as name:
        folder = Path(name)
        pod_port, state_port, router_port = _free_ports(3)
        processes = _start(folder, args.pod, pod_port, state_port, router_port)
        try:
            _wait_ready(router_port, folder / "log")
            router = psutil.Process(processes[1].pid)
            print(
                f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()}"
            )
            print(f"pod: {args.pod}; prompt {len(PROMPT)} tokens; streamed answers in {CHUNKS} writes")
            _table(args, load_keys(folder / "keys", need_kv=False).bearer(), pod_port, router_port, router)
            print(f"router's memory: {router.memory_info().rss / 2**20:.0f} MiB")
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(20)


def _table(args: argparse.Namespace, bearer: str, pod_port: int, router_port: int, router: psutil.Process) -> None:
    print(f"{'case':<22}{'side':<8}{'req/s':>8}{'p50 ms':>9}{'p99 ms':>9}{'added p50':>11}{'router CPU us/req':>19}")
    for stream in (False, True):
        for concurrency in map(int, args.concurrency.split(",")):
            tokens = CHUNKS if stream else TOKENS
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": stream}
            request = _request(body, bearer)
            sides = {
                side: _measure(port, request, concurrency, args.seconds, router)
                for side, port in (("pod", pod_port), ("router", router_port))
            }
            base = statistics.median(sides["pod"].first if stream else sides["pod"].whole)
            for side, result in sides.items():
                values = result.first if stream else result.whole
                case = f"{'stream' if stream else 'whole'} c={concurrency}"
                added = "" if side == "pod" else f"{1000 * (statistics.median(values) - base):+.2f}"
                cpu = "" if side == "pod" else f"{1e6 * result.cpu_s / result.requests:.0f}"
                print(
                    f"{case:<22}{side:<8}{result.requests / result.seconds:>8.0f}{_at(values, 0.5):>9.2f}"
                    f"{_at(values, 0.99):>9.2f}{added:>11}{cpu:>19}"
                )


if __name__ == "__main__":
    main()
