"""An owner in a process of its own, for tests that stop and kill it."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from kvferry_wire.handle import KVHandle
from kvferry_wire.layout import KVGroup
from tests.runtime.transfer.builders import make_engine, make_limits

BIG = KVGroup(name="full", layers=8, kv_heads=8, head_dim=64, dtype="float32")  # 512 KiB a block
BLOCKS = 128


def pattern(block_id: int) -> bytes:
    """What the owner's blocks hold."""
    return bytes((block_id,)) * BIG.block_bytes(16)


def own(pipe: Connection, limits: dict[str, float]) -> None:
    """Grant what is asked for; answer ``None`` with the number of live leases; end at EOF."""
    engine = make_engine(groups=(BIG,), blocks=BLOCKS, limits=make_limits(**limits))
    for block_id in range(1, BLOCKS):
        engine.memory.block(0, block_id)[:] = pattern(block_id)
    pipe.send(os.getpid())
    try:
        while True:
            asked = pipe.recv()
            if asked is None:
                engine.service.check_integrity()
                pipe.send(engine.service.state().leases)
            else:
                pipe.send(engine.grant((asked,), tuple(range(len(asked) * 16))))
    except EOFError:
        engine.service.close(5.0)


class OwnerProcess:
    """The test's end of an owner process."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self._pipe = pipe
        self._pid = pid

    def grant(self, blocks: tuple[int, ...]) -> KVHandle:
        self._pipe.send(blocks)
        return self._pipe.recv()

    def leases(self) -> int:
        self._pipe.send(None)
        return self._pipe.recv()

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


@contextmanager
def owner_process(**limits: float) -> Iterator[OwnerProcess]:
    """Start an owner; end it, whatever state it is in."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs, limits), daemon=True)
    process.start()
    theirs.close()
    owner = OwnerProcess(ours, process.pid or 0)
    try:
        assert ours.poll(30.0), "the owner did not start"
        ours.recv()
        yield owner
    finally:
        if process.is_alive():
            owner.resume()
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join(5.0)
        process.close()
