"""What a hand-off costs a user: from prefill's answer to the first token that decode computes itself.

    python benchmarks/handoff.py [--model DIR] [--rounds 5] [--tokens 128,512,2048]

Starts two pods as a service does (one compute thread each, so that they share two cores), sends each prompt to prefill
and its handle to decode, and times, at the client:

- hand-off: from the frame that holds prefill's first token to decode's first own token (second of the answer);
- pull: the time and rate of the KV transfer inside decode, from its metrics;
- step: decode's next token after that, which is part of every hand-off and is no cost of the ferry.

Beside it, in the same run, a plain copy of as many bytes in this process, and the same prompts at two pods that make no
checksums: what those cost, of a hand-off and of the time from the request to decode's first own token. Every pull must
have succeeded: a recomputed prompt is an error, not a figure.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from kvferry_runtime.model.fetch import default_root, fetch
from kvferry_service.key_files import create_keys, load_keys
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import End, Fail, Frame, FrameDecoder, Prefilled, Tokens
from kvferry_wire.leg import AnswerFormat, ChoiceState, Leg, Sampling

START_S = 300.0
ANSWER_TOKENS = 4
KV_MEMORY = "512MiB"
METRICS = ("kv_pulls_ok_total", "kv_pulled_bytes_total", "kv_pull_seconds_total")


@contextlib.contextmanager
def pod(folder: Path, model: str, role: str, kv_memory: str = KV_MEMORY, *more: str) -> Iterator[str]:
    """A pod with its planes on free ports; its base URL. ``more``: further flags."""
    name = "".join((role, *more))
    ready, log = folder / f"{name}.json", folder / f"{name}.log"
    flags = ["--port", "0", "--keys-dir", str(folder / "keys"), "--ready-file", str(ready), "--role", role]
    flags += [
        "--model",
        model,
        "--served-name",
        "m",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--kv-memory",
        kv_memory,
        *more,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "kvferry_runtime.server", *flags], stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield f"http://127.0.0.1:{msgspec.json.decode(ready.read_bytes())['http']}"
    finally:
        process.terminate()
        process.wait(30)


async def frames(session: aiohttp.ClientSession, url: str, leg: Leg) -> AsyncIterator[tuple[float, Frame]]:
    """The leg's frames with the time each came."""
    decoder = FrameDecoder()
    async with session.post(url, data=msgspec.msgpack.encode(leg)) as response:
        async for part in response.content.iter_any():
            now = time.perf_counter()
            for frame in decoder.feed(part):
                if isinstance(frame, Fail):
                    raise SystemExit(f"{url}: {frame.kind}: {frame.message}")
                yield now, frame


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The transfer's counters in decode; they follow the engine's heartbeat, each half second."""
    await asyncio.sleep(1.2)
    async with session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found = (line.removeprefix("kvferry:").split() for line in lines if line.startswith("kvferry:"))
    return {name: float(value) for name, value in found if name in METRICS}


@dataclass(frozen=True, slots=True)
class HandOff:
    """Seconds."""

    whole: float  # from the request to decode's first own token
    hand_off: float  # of it, from prefill's answer on
    step: float  # one decode step after it


async def hand_off(session: aiohttp.ClientSession, prefill: str, decode: str, leg: Leg) -> HandOff:
    """One answer, computed on the first pod and continued on the second; prefill's stream stays open, as a router's."""
    leg = msgspec.structs.replace(leg, attached=True)
    began, answered = time.perf_counter(), 0.0
    times: list[float] = []
    async for at, frame in frames(session, prefill + "/internal/v1/prefill", leg):
        if not isinstance(frame, Prefilled):
            continue
        if frame.handle is None:
            raise SystemExit("prefill gave no handle: the answer ended with its first token")
        answered = at
        second = msgspec.structs.replace(
            leg, attempt=1, handle=frame.handle, choices=(ChoiceState(emitted=frame.first),)
        )
        async for now, own in frames(session, decode + "/internal/v1/generate", second):
            if isinstance(own, Tokens):
                times += [now] * len(own.ids)
            elif isinstance(own, End) and own.recomputed:
                raise SystemExit(f"recomputed: {own.recomputed}")
    if len(times) < leg.sampling.max_tokens - 1:
        raise SystemExit(f"{len(times)} tokens came from decode, of {leg.sampling.max_tokens - 1}")
    # The first token is prefill's, passed on at once.
    first = times[1 - leg.sampling.max_tokens]
    return HandOff(whole=first - began, hand_off=first - answered, step=times[-1] - times[-2])


def make_leg(name: str, tokens: int, seed: int, *, largest_id: int = 40_000, answer: int = ANSWER_TOKENS) -> Leg:
    ids = np.random.default_rng(seed).integers(100, largest_id, tokens)
    return Leg(
        internal_id=name,
        attempt=0,
        request_id=name,
        deadline_ms=120_000,
        prompt_ids=tuple(int(token) for token in ids),
        choices=(ChoiceState(),),
        sampling=Sampling(seed=1, max_tokens=answer, temperature=0.0, ignore_eos=True),
        format=AnswerFormat(kind="completion", stream=True, include_usage=False, response_id="r", created=1, model="m"),
        extras=KeyExtras(),
    )


def copy_seconds(nbytes: int) -> float:
    """Median seconds of a plain copy of as many bytes."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return median(times)


Pair = tuple[str, str]  # base URLs of a prefill and a decode pod


async def measure(folder: Path, pair: Pair, plain: Pair, sizes: list[int], rounds: int) -> None:
    """``plain``: the pair that makes no checksums."""
    keys = load_keys(folder / "keys", need_kv=True)
    headers = {"Authorization": f"Bearer {keys.bearer()}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(300)) as session:
        for each in (pair, plain):
            await hand_off(session, *each, make_leg("warm", 64, 0))
        print("| tokens | MiB | hand-off ms | of it one decode step | pull ms | pull MB/s | plain copy ms |", end="")
        print(" checksums add to the hand-off | and to the time from the request |")
        print("|---|---|---|---|---|---|---|---|---|")
        for size in sizes:
            before = await metrics(session, pair[1])
            ours, theirs = [], []
            for number in range(rounds):
                leg = make_leg(f"{size}-{number}", size, 1000 * size + number)
                for each, found in ((pair, ours), (plain, theirs))[:: 1 if number % 2 else -1]:
                    found.append(await hand_off(session, *each, leg))
            after = await metrics(session, pair[1])
            moved: dict[str, Any] = {name: after[name] - before[name] for name in METRICS}
            if moved["kv_pulls_ok_total"] != rounds:
                raise SystemExit(f"{moved['kv_pulls_ok_total']:.0f} pulls in {rounds} rounds")
            nbytes = int(moved["kv_pulled_bytes_total"] / rounds)
            seconds = moved["kv_pull_seconds_total"] / rounds
            cells = (
                f"{size}",
                f"{nbytes / 2**20:.1f}",
                f"{1e3 * median(each.hand_off for each in ours):.1f}",
                f"{1e3 * median(each.step for each in ours):.1f}",
                f"{1e3 * seconds:.1f}",
                f"{nbytes / seconds / 1e6:.0f}",
                f"{1e3 * copy_seconds(nbytes):.1f}",
                f"{median(a.hand_off / b.hand_off - 1 for a, b in zip(ours, theirs, strict=True)):+.1%}",
                f"{median(a.whole / b.whole - 1 for a, b in zip(ours, theirs, strict=True)):+.1%}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="default: the demo model, fetched if need be")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="128,512,2048")
    given = parser.parse_args()
    model = given.model or str(fetch("smollm2-135m-instruct", default_root(), progress=True))
    print(
        f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    print(f"command: python {' '.join(sys.argv)}\nmodel:   {Path(model).name}, float32, one thread a pod\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_keys(folder / "keys")
        sizes = [int(size) for size in given.tokens.split(",")]
        with contextlib.ExitStack() as pods:
            pair, plain = (
                (
                    pods.enter_context(pod(folder, model, "prefill", KV_MEMORY, *more)),
                    pods.enter_context(pod(folder, model, "decode", KV_MEMORY, *more)),
                )
                for more in ((), ("--no-checksums",))
            )
            uvloop.run(measure(folder, pair, plain, sizes, given.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
