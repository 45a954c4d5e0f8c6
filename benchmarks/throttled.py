"""What running streams feel of transfers that crawl: the time between tokens beside pulls at 1 KB/s or that stop short.

    python benchmarks/throttled.py [--seconds 8]

Two pods with the toy model (10 ms a step). Eight streams run at decode. For half of the time nothing else happens; for
the other half decode is given handles whose data port is a proxy that lets 1 KB/s through, or keeps the last byte. The
legs must have their KV (`must_pull`), so that no prompt is computed instead: what is measured is the transfer alone.
"""

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
from handoff import frames, make_leg, pod

from kvferry_runtime.transfer.backends.tcp import TcpDescriptor
from kvferry_runtime.transfer.backends.tcp_link import HEAD
from kvferry_service.key_files import create_keys, load_keys
from kvferry_wire.data import NONCE_BYTES, PROOF_BYTES, ReadReply, encode
from kvferry_wire.frames import Fail, Frame, FrameDecoder, Prefilled, Tokens
from kvferry_wire.handle import KVHandle
from kvferry_wire.leg import ChoiceState, Leg

STREAMS, CRAWLERS, PROMPT, STEP_S = 8, 3, 512, 0.01
RATIO_TARGET, TRIP_TARGET_S = 1.5, 2.0
RATE = 1000  # bytes a second


async def crawl(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, last_byte: bool) -> None:
    """Toward the reader: all but the last byte of the blocks at once and then nothing, or everything at `RATE`."""
    blocks = PROMPT * 16  # bytes: K and V of a token are 8 each
    left = NONCE_BYTES + PROOF_BYTES + HEAD.size + len(encode(ReadReply("ok", blocks))) + blocks - 1
    while data := await source.read(min(left, 65536) if last_byte else RATE // 20):
        target.write(data)
        left -= len(data)
        if last_byte and not left:
            await asyncio.sleep(60)
        if not last_byte:
            await asyncio.sleep(len(data) / RATE)


async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)


async def start_proxy(port: int, *, last_byte: bool) -> asyncio.Server:
    """In front of prefill's data port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        ways = [asyncio.create_task(pass_on(reader, far_writer))]
        ways.append(asyncio.create_task(crawl(far_reader, writer, last_byte=last_byte)))
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, far_writer):
            end.close()

    return await asyncio.start_server(connected, "127.0.0.1", 0)


async def stream(session: aiohttp.ClientSession, decode: str, leg: Leg, gaps: list[tuple[float, float]]) -> None:
    """Note when each token came and how long after the one before."""
    last = 0.0
    async for now, frame in frames(session, decode + "/internal/v1/generate", leg):
        if isinstance(frame, Tokens) and frame.ids:
            if last:
                gaps.append((now, now - last))
            last = now


async def last_frame(session: aiohttp.ClientSession, url: str, leg: Leg) -> Frame:
    decoder = FrameDecoder()
    found: list[Frame] = []
    async with session.post(url, data=msgspec.msgpack.encode(leg)) as response:
        async for part in response.content.iter_any():
            found += decoder.feed(part)
    return found[-1]


async def crawler(
    session: aiohttp.ClientSession, prefill: str, decode: str, kv_key: bytes, number: int, proxy: int, until: float
) -> list[float]:
    """One hand-off after the other through the proxy; seconds until decode gave each of them up."""
    trips: list[float] = []
    while time.perf_counter() < until:
        leg = make_leg(f"crawl-{number}-{len(trips)}", PROMPT, 1000 * number + len(trips), largest_id=500)
        answer = await last_frame(session, prefill + "/internal/v1/prefill", leg)
        if not isinstance(answer, Prefilled) or answer.handle is None:
            raise SystemExit(f"prefill: {answer}")
        handle: KVHandle = msgspec.structs.replace(answer.handle, backends={"tcp": encode(TcpDescriptor(proxy))})
        second = msgspec.structs.replace(
            leg,
            attempt=1,
            handle=handle.signed(kv_key),
            choices=(ChoiceState(emitted=answer.first),),
            must_pull=True,
        )
        began = time.perf_counter()
        ended = await last_frame(session, decode + "/internal/v1/generate", second)
        if not isinstance(ended, Fail) or ended.kind != "transfer":
            raise SystemExit(f"a transfer at {RATE} bytes a second went well: {ended}")
        trips.append(time.perf_counter() - began)
    return trips


async def measure(folder: Path, prefill: str, decode: str, seconds: float) -> None:
    keys = load_keys(folder / "keys", need_kv=True)
    assert keys.kv is not None
    headers = {"Authorization": f"Bearer {keys.bearer()}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(600)) as session:
        async with session.get(prefill + "/internal/v1/info") as response:
            data_port = (await response.json())["ports"]["data"]
        proxies = [await start_proxy(data_port, last_byte=number % 2 == 0) for number in range(CRAWLERS)]
        tokens = int(2.2 * seconds / STEP_S)
        gaps: list[tuple[float, float]] = []
        legs = [make_leg(f"stream-{n}", 64, n, largest_id=500, answer=tokens) for n in range(STREAMS)]
        streams = [asyncio.create_task(stream(session, decode, leg, gaps)) for leg in legs]
        await asyncio.sleep(0.5)  # all run
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        middle = time.perf_counter()
        ports = [proxy.sockets[0].getsockname()[1] for proxy in proxies]
        crawlers = [
            crawler(session, prefill, decode, keys.kv, n + 1, port, middle + seconds) for n, port in enumerate(ports)
        ]
        trips = [trip for found in await asyncio.gather(*crawlers) for trip in found]
        end = time.perf_counter()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for proxy in proxies:
            proxy.close()
    alone = sorted(gap for at, gap in gaps if began <= at < middle)
    beside = sorted(gap for at, gap in gaps if middle <= at < end)
    tell(alone, beside, trips)


def tell(alone: list[float], beside: list[float], trips: list[float]) -> None:
    print("| streams | tokens | gap p50 ms | gap p99 ms |\n|---|---|---|---|")
    for name, found in (("alone", alone), ("beside crawling transfers", beside)):
        p50, p99 = (1e3 * found[int(len(found) * share)] for share in (0.5, 0.99))
        print(f"| {name} | {len(found)} | {p50:.1f} | {p99:.1f} |")
    ratio = beside[int(len(beside) * 0.99)] / alone[int(len(alone) * 0.99)]
    print(f"\np99 beside / alone: {ratio:.2f} (target <= {RATIO_TARGET}: {reached(ratio <= RATIO_TARGET)})")
    print(
        f"{len(trips)} transfers given up after {min(trips):.2f} to {max(trips):.2f} s"
        f" (target about {TRIP_TARGET_S:g} s: {reached(max(trips) <= 1.1 * TRIP_TARGET_S)})"
    )


def reached(true: bool) -> str:
    return "reached" if true else "not reached"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each half (default: 8)")
    seconds = parser.parse_args().seconds
    machine = platform.processor() or platform.machine()
    print(f"machine: {machine}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"command: python {' '.join(sys.argv)}\n")
    model = f"toy:step_ms={1000 * STEP_S:g}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_keys(folder / "keys")
        with pod(folder, model, "prefill", "4MiB") as prefill, pod(folder, model, "decode", "4MiB") as decode:
            asyncio.run(measure(folder, prefill, decode, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
