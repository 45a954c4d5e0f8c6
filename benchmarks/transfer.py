"""How fast KV is ferried, beside the plainest thing that moves as many bytes on the same machine in the same run.

    python benchmarks/transfer.py [--rounds N]

Two processes: this one pulls, a child owns the blocks. Ratios are medians of interleaved rounds:

- contiguous and scattered: 1000 blocks of 64 KiB through `TransferService`, against a bare socket pair that sends one
  64 MiB buffer with `sendall` and takes it with `recv_into` into one buffer;
- checksums: the same pulls with and without them, in pairs; and what making them costs the owner when it grants;
- hand-off in the engine: a pull of one 4 KiB block (hold, renew, read, release), less the time of as many bytes on the
  bare socket: its fixed cost; beside it CPU time and waits of both processes, which other load changes little;
- hand-off end to end: two pods with the toy model, from prefill's answer at the client to decode's first own token,
  less one decode step and the wire;
- tokens: blocks of SmolLM2-135M (16 tokens, 737,280 bytes), beside a `memcpy` of as many bytes.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import queue
import resource
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import uvloop
from handoff import frames, hand_off, make_leg, pod

from kvferry_runtime.core.messages import GrantLease, HoldLease, LegKey, Posted, PullFinished, StartPull
from kvferry_runtime.transfer.config import TransferConfig
from kvferry_runtime.transfer.memory import ToyBlockMemory
from kvferry_runtime.transfer.service import TransferService
from kvferry_service.key_files import create_keys, load_keys
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import Tokens
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import prompt_digest
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.layout import KVGroup

MIB = 2**20
CHECKSUM_TARGET = 0.05  # of a pull's time
SHARE_TARGETS = {"contiguous": 0.9, "scattered": 0.8}
ENGINE_TARGET_MS, END_TO_END_TARGET_MS = 0.5, 2.0  # p50 of the fixed cost
TOY_TOKENS, TOY_KV = 256, "256KiB"  # 4 KiB of KV, in 1024 blocks
PAUSE_S = 0.02  # between hand-offs: an engine that becomes idle checks its books
KEYS = ServiceKeys(http=b"h" * 32, state=b"s" * 32, hash=b"x" * 32, kv=b"k" * 32)
SHAPES = {
    "4K": (KVGroup(name="full", layers=1, kv_heads=1, head_dim=32, dtype="float32"), 64),
    "64K": (KVGroup(name="full", layers=4, kv_heads=2, head_dim=64, dtype="float32"), 1024),
    "smollm2": (KVGroup(name="full", layers=30, kv_heads=3, head_dim=64, dtype="float32"), 160),
}


def make_memory(shape: str) -> ToyBlockMemory:
    group, blocks = SHAPES[shape]
    memory = ToyBlockMemory((group,), 16, blocks)
    for block_id in range(1, blocks):  # touched, so that no page is first mapped while it is measured
        memory.block(0, block_id)[:] = bytes((block_id % 251,)) * group.block_bytes(16)
    return memory


def make_service(memory: ToyBlockMemory, post: Callable[[Posted], None], *, checksums: bool = False) -> TransferService:
    config = TransferConfig(
        incarnation=secrets.token_bytes(16),
        epoch=1,
        compat_hash="benchmark",
        layout=memory.layout(),
        checksums=checksums,
    )
    return TransferService(config=config, keys=KEYS, memory=memory, post=post)


@dataclass(frozen=True, slots=True)
class Effort:
    """What a process has spent: CPU seconds, and how often one of its threads has waited for something."""

    cpu: float
    waits: int

    @classmethod
    def so_far(cls) -> "Effort":
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime + used.ru_stime, used.ru_nvcsw)

    def since(self, before: "Effort") -> "Effort":
        return Effort(self.cpu - before.cpu, self.waits - before.waits)


# ---- the owner's process -----------------------------------------------------------------------------------------


def own_blocks(pipe: Connection) -> None:
    """Grant what is asked for (shape, checksums or not, block ids), until told None; "effort" asks for its own."""
    memories: dict[str, ToyBlockMemory] = {}
    services: dict[tuple[str, bool], TransferService] = {}
    lease_id = 0
    while (asked := pipe.recv()) is not None:
        if asked == "effort":
            pipe.send(Effort.so_far())
            continue
        shape, checksums, blocks = asked
        if (shape, checksums) not in services:
            if shape not in memories:
                memories[shape] = make_memory(shape)
            services[shape, checksums] = make_service(memories[shape], lambda posted: None, checksums=checksums)
            services[shape, checksums].start()
        lease_id += 1
        tokens = len(blocks) * 16
        digest = prompt_digest(b"k" * 32, range(tokens), KeyExtras())
        grant = GrantLease(
            key=LegKey("bench", lease_id),
            lease_id=lease_id,
            epoch=1,
            prompt_digest=digest,
            blocks=(tuple(blocks),),
            token_count=tokens,
        )
        began = time.perf_counter()
        handle = services[shape, checksums].grant(grant)
        took = time.perf_counter() - began
        services[shape, checksums].answered(lease_id, True)
        pipe.send((handle, took))
    for service in services.values():
        service.close(5.0)


def send_buffer(port: int) -> None:
    """The bare socket's far end: for each request of 8 bytes, send as many bytes of one buffer."""
    data = bytearray(os.urandom(64 * MIB))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := sock.recv(8):
            sock.sendall(memoryview(data)[: int.from_bytes(request, "little")])


# ---- this process ------------------------------------------------------------------------------------------------


class Puller:
    """Pulls from the owner's process; times one pull from `hold` to `PullFinished`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._services: dict[str, tuple[TransferService, queue.SimpleQueue[Posted]]] = {}
        self._count = 0
        self.grant_seconds = 0.0  # of the last pull's lease, at its owner

    def effort(self) -> tuple[Effort, Effort]:
        """Of this process and of the owner's, so far."""
        self._pipe.send("effort")
        return Effort.so_far(), self._pipe.recv()

    def pull(self, shape: str, remote: list[int], local: list[int], *, checksums: bool = False) -> float:
        """Seconds of one pull."""
        if shape not in self._services:
            inbox: queue.SimpleQueue[Posted] = queue.SimpleQueue()
            service = make_service(make_memory(shape), inbox.put)
            service.start()
            self._services[shape] = (service, inbox)
        service, inbox = self._services[shape]
        self._pipe.send((shape, checksums, remote))
        handle: KVHandle
        handle, self.grant_seconds = self._pipe.recv()
        self._count += 1
        key = LegKey("pull", self._count)
        began = time.perf_counter()
        service.hold(HoldLease(key=key, handle=handle, deadline_s=60.0))
        service.pull(StartPull(key=key, handle=handle, blocks=(tuple(local),), deadline_s=60.0))
        finished = inbox.get(timeout=60.0)
        seconds = time.perf_counter() - began
        assert isinstance(finished, PullFinished) and not finished.reason, finished
        return seconds

    def close(self) -> None:
        for service, _ in self._services.values():
            service.close(5.0)


class BareSocket:
    """One connection and one buffer."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._process = multiprocessing.get_context("spawn").Process(target=send_buffer, args=(port,), daemon=True)
        self._process.start()
        self._sock, _ = listener.accept()
        listener.close()
        self._buffer = memoryview(bytearray(b"\1" * (64 * MIB)))

    def take(self, nbytes: int) -> float:
        """Seconds until so many bytes are in the buffer."""
        began = time.perf_counter()
        self._sock.sendall(nbytes.to_bytes(8, "little"))
        target = self._buffer[:nbytes]
        while target:
            target = target[self._sock.recv_into(target) :]
        return time.perf_counter() - began

    def close(self) -> None:
        self._sock.close()
        self._process.join(5.0)


def copy_blocks(memory: ToyBlockMemory, count: int) -> float:
    """Seconds of a plain copy of so many blocks."""
    began = time.perf_counter()
    for index in range(count):
        memory.block(0, 159 - index)[:] = memory.block(0, 1 + index % 16)
    return time.perf_counter() - began


def spread(count: int, blocks: int, stride: int) -> list[int]:
    """`count` different ids of 1..blocks-1, no two neighbours adjacent (`stride` is coprime to blocks - 1)."""
    return [1 + index * stride % (blocks - 1) for index in range(count)]


def measure_bandwidth(puller: Puller, bare: BareSocket, rounds: int) -> None:
    nbytes = 1000 * 64 * 1024
    ids = list(range(1, 1001))
    remote, local = spread(1000, 1024, 389), spread(1000, 1024, 610)
    took: dict[str, list[float]] = {"bare socket": [], "contiguous": [], "scattered": []}
    for round_number in range(rounds + 2):
        figures = {
            "bare socket": bare.take(nbytes),
            "contiguous": puller.pull("64K", ids, ids),
            "scattered": puller.pull("64K", remote, local),
        }
        if round_number >= 2:  # the first ones warm up
            for name, seconds in figures.items():
                took[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    print(f"\n1000 blocks of 64 KiB ({nbytes / MIB:.1f} MiB), median of {rounds} [quartiles]")
    for name, seconds in medians.items():
        shares = sorted(b / s for b, s in zip(took["bare socket"], took[name], strict=True))
        paired = statistics.median(shares)
        low, high = shares[len(shares) // 4], shares[-1 - len(shares) // 4]
        target = SHARE_TARGETS.get(name)
        told = "" if target is None else f"   target >= {target:.0%}: {reached(paired >= target)}"
        share = f"{paired:6.0%} of the bare socket [{low:.0%} .. {high:.0%}]"
        print(f"  {name:12s} {nbytes / MIB / seconds:8.0f} MiB/s   {share}{told}")


def measure_checksums(puller: Puller, rounds: int) -> None:
    """What they add to a pull, where both sides move nothing else; and to the grant, in the engine's own thread."""
    print(f"\nchecksums: pulls with and without, pairs of {rounds * 2} rounds [quartiles]")
    for name, shape, count in (("1000 of 64 KiB", "64K", 1000), ("128 of SmolLM2 (2048 tokens)", "smollm2", 128)):
        blocks = SHAPES[shape][1]
        remote, local = spread(count, blocks, 61), spread(count, blocks, 100)
        added, grants, cpu = [], [], []
        for round_number in range(rounds * 2 + 1):
            seconds: dict[bool, float] = {}
            spent: dict[bool, float] = {}
            for checksums in (True, False) if round_number % 2 else (False, True):
                before = puller.effort()
                seconds[checksums] = puller.pull(shape, remote, local, checksums=checksums)
                spent[checksums] = sum(now.since(then).cpu for now, then in zip(puller.effort(), before, strict=True))
                if checksums:
                    grants.append(puller.grant_seconds)
            added.append(seconds[True] / seconds[False] - 1)
            cpu.append(spent[True] / spent[False] - 1)
        del added[0], grants[0], cpu[0]
        cost, low, high = (statistics.quantiles(added, n=4)[place] for place in (1, 0, 2))
        print(
            f"  {name:28s} pull {cost:+6.1%} [{low:+.1%} .. {high:+.1%}]   target < {CHECKSUM_TARGET:.0%}:"
            f" {reached(cost < CHECKSUM_TARGET)}; grant {statistics.median(grants) * 1e3:.1f} ms;"
            f" CPU of both processes {statistics.median(cpu):+.1%}, the grant's included"
        )


def measure_hand_off(puller: Puller, bare: BareSocket, rounds: int) -> None:
    """In the engine: from `hold` to `PullFinished`, less what a bare socket takes for as many bytes."""
    for _ in range(5):
        puller.pull("4K", [1], [2])
    before = puller.effort()
    pulls = [puller.pull("4K", [1], [2]) for _ in range(rounds * 20)]
    ours, theirs = (now.since(then) for now, then in zip(puller.effort(), before, strict=True))
    pairs = [(puller.pull("4K", [1], [2]), bare.take(4096)) for _ in range(rounds * 20)]
    print(f"\nhand-off of one 4 KiB block in the engine, of {len(pairs)}")
    print_fixed_cost([pull for pull, _ in pairs], [wire for _, wire in pairs], ENGINE_TARGET_MS)
    for name, effort in (("reader", ours), ("owner", theirs)):
        print(
            f"  {name:12s} {effort.cpu / len(pulls) * 1e3:6.2f} ms of CPU, {effort.waits / len(pulls):.1f} waits each"
        )


def measure_end_to_end(bare: BareSocket, rounds: int) -> None:
    """Between two pods: from prefill's answer to decode's first own token, less one decode step, less the wire."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_keys(folder / "keys")
        with pod(folder, "toy", "prefill", TOY_KV) as prefill, pod(folder, "toy", "decode", TOY_KV) as decode:
            pairs, step = uvloop.run(hand_offs(folder, prefill, decode, bare, rounds))
    print(f"\nhand-off of {TOY_TOKENS} tokens of the toy model between two pods (4 KiB of KV), of {len(pairs)}")
    print(f"  one decode step, left out: {step * 1e3:.2f} ms")
    print_fixed_cost([whole - step for whole, _ in pairs], [wire for _, wire in pairs], END_TO_END_TARGET_MS)


async def hand_offs(
    folder: Path, prefill: str, decode: str, bare: BareSocket, rounds: int
) -> tuple[list[tuple[float, float]], float]:
    """Seconds of each hand-off and of as many bytes on the bare socket; and of one decode step."""
    headers = {"Authorization": f"Bearer {load_keys(folder / 'keys', need_kv=True).bearer()}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(60)) as session:
        pairs = []
        for number in range(rounds * 10 + 10):
            await asyncio.sleep(PAUSE_S)
            leg = make_leg(f"e2e-{number}", TOY_TOKENS, number, largest_id=500)
            timed = await hand_off(session, prefill, decode, leg)
            pairs.append((timed.hand_off, bare.take(4096)))
        times: list[float] = []
        leg = make_leg("steps", TOY_TOKENS, 10**6, largest_id=500, answer=400)
        async for now, frame in frames(session, decode + "/internal/v1/generate", leg):
            if isinstance(frame, Tokens):
                times += [now] * len(frame.ids)
    return pairs[10:], (times[-1] - times[0]) / (len(times) - 1)


def print_fixed_cost(took: list[float], wire: list[float], target_ms: float) -> None:
    """Percentiles of the whole, of the wire alone, and of their difference, which has a target."""
    fixed = [whole - alone for whole, alone in zip(took, wire, strict=True)]
    for name, seconds in (("hand-off", took), ("bare socket", wire), ("fixed cost", fixed)):
        ordered = sorted(seconds)
        p50, p99 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        told = f"   target p50 <= {target_ms:g} ms: {reached(p50 <= target_ms)}" if name == "fixed cost" else ""
        print(f"  {name:12s} p50 {p50:6.2f} ms, p99 {p99:6.2f} ms{told}")


def reached(true: bool) -> str:
    return "reached" if true else "not reached"


def measure_tokens(puller: Puller, bare: BareSocket, rounds: int) -> None:
    memory = make_memory("smollm2")
    print(f"\nSmolLM2-135M float32, 737,280 bytes per 16 tokens, median of {rounds}")
    print("  tokens      MiB   pull ms   MiB/s   memcpy ms   bare socket ms   of the socket")
    for tokens in (128, 512, 2048):
        count = tokens // 16
        nbytes = count * 737_280
        pulls, copies, bares = [], [], []
        for _ in range(rounds + 1):
            pulls.append(puller.pull("smollm2", spread(count, 160, 61), spread(count, 160, 100)))
            copies.append(copy_blocks(memory, count))
            bares.append(sum(bare.take(min(64 * MIB, nbytes - at)) for at in range(0, nbytes, 64 * MIB)))
        pull, copy, plain = (statistics.median(figures[1:]) for figures in (pulls, copies, bares))
        paired = statistics.median(b / p for b, p in zip(bares[1:], pulls[1:], strict=True))
        print(
            f"  {tokens:6d} {nbytes / MIB:8.1f} {pull * 1e3:9.1f} {nbytes / MIB / pull:7.0f} {copy * 1e3:11.1f}"
            f" {plain * 1e3:16.1f} {paired:15.0%}"
        )


def cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure KV transfer beside a bare socket and a memcpy.")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds of each figure (default: 15)")
    rounds = parser.parse_args().rounds
    print(f"machine: {cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.system()}")
    print(f"command: python {' '.join(sys.argv)}  (Python {platform.python_version()})")
    ours, theirs = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=own_blocks, args=(theirs,), daemon=True)
    owner.start()
    puller, bare = Puller(ours), BareSocket()
    try:
        measure_bandwidth(puller, bare, rounds)
        measure_checksums(puller, rounds)
        measure_hand_off(puller, bare, rounds)
        measure_end_to_end(bare, rounds)
        measure_tokens(puller, bare, rounds)
    finally:
        ours.send(None)
        puller.close()
        bare.close()
        owner.join(10.0)


if __name__ == "__main__":
    main()
