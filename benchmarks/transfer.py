"""How fast KV is ferried, beside the plainest thing that moves as many bytes on the same machine in the same run.

    python benchmarks/transfer.py [--rounds N]

Two processes: this one pulls, a child owns the blocks. Ratios are medians of interleaved rounds:

- contiguous and scattered: 1000 blocks of 64 KiB through `TransferService`, against a bare socket pair that sends one
  64 MiB buffer with `sendall` and takes it with `recv_into` into one buffer;
- hand-off: a pull of one 4 KiB block, which is nearly all fixed cost (hold, renew, read, release);
- tokens: blocks of SmolLM2-135M (16 tokens, 737,280 bytes), beside a `memcpy` of as many bytes.
"""

import argparse
import multiprocessing
import os
import platform
import queue
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from kvferry_runtime.core.messages import GrantLease, HoldLease, LeaseEnded, LegKey, PullFinished, StartPull
from kvferry_runtime.transfer.config import TransferConfig
from kvferry_runtime.transfer.memory import ToyBlockMemory
from kvferry_runtime.transfer.service import TransferService
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import prompt_digest
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.layout import KVGroup

MIB = 2**20
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


def make_service(memory: ToyBlockMemory, post: Callable[[PullFinished | LeaseEnded], None]) -> TransferService:
    config = TransferConfig(
        incarnation=secrets.token_bytes(16), epoch=1, compat_hash="benchmark", layout=memory.layout()
    )
    return TransferService(config=config, keys=KEYS, memory=memory, post=post)


# ---- the owner's process -----------------------------------------------------------------------------------------


def own_blocks(pipe: Connection) -> None:
    """Grant what is asked for (shape, block ids), until told None."""
    services: dict[str, TransferService] = {}
    lease_id = 0
    while (asked := pipe.recv()) is not None:
        shape, blocks = asked
        if shape not in services:
            services[shape] = make_service(make_memory(shape), lambda ended: None)
            services[shape].start()
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
        handle = services[shape].grant(grant)
        services[shape].answered(lease_id, True)
        pipe.send(handle)
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
        self._services: dict[str, tuple[TransferService, queue.SimpleQueue[PullFinished | LeaseEnded]]] = {}
        self._count = 0

    def pull(self, shape: str, remote: list[int], local: list[int]) -> float:
        """Seconds of one pull."""
        if shape not in self._services:
            inbox: queue.SimpleQueue[PullFinished | LeaseEnded] = queue.SimpleQueue()
            service = make_service(make_memory(shape), inbox.put)
            service.start()
            self._services[shape] = (service, inbox)
        service, inbox = self._services[shape]
        self._pipe.send((shape, remote))
        handle: KVHandle = self._pipe.recv()
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
    print(f"\n1000 blocks of 64 KiB ({nbytes / MIB:.1f} MiB), median of {rounds}")
    for name, seconds in medians.items():
        paired = statistics.median(b / s for b, s in zip(took["bare socket"], took[name], strict=True))
        print(f"  {name:12s} {nbytes / MIB / seconds:8.0f} MiB/s   {paired:6.0%} of the bare socket")


def measure_hand_off(puller: Puller, rounds: int) -> None:
    took = sorted(puller.pull("4K", [1], [2]) for _ in range(rounds * 10 + 5))
    print(f"\nhand-off of one 4 KiB block, of {len(took)}")
    print(f"  p50 {took[len(took) // 2] * 1e3:.2f} ms, p99 {took[int(len(took) * 0.99)] * 1e3:.2f} ms")


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
        measure_hand_off(puller, rounds)
        measure_tokens(puller, bare, rounds)
    finally:
        ours.send(None)
        puller.close()
        bare.close()
        owner.join(10.0)


if __name__ == "__main__":
    main()
