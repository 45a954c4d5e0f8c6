"""The EngineCore process: ``python -m kvferry_runtime.engine.process --link-fd N --parent-fd M``.

Its configuration comes on standard input.

Started by ``engine.child`` alone. Exit status: 0 after an ordered end, 1 after a failure (the API server starts
another process), 2 when it cannot run as configured.
"""

import argparse
import os
import signal
import socket
import sys

import msgspec
import zmq

from kvferry_runtime.engine import messages
from kvferry_runtime.engine.link import Link, ServerGoneError
from kvferry_runtime.engine.messages import EngineConfig, NotStarted, Ready
from kvferry_runtime.engine.state_stream import StateNumbers, StatePublisher
from kvferry_runtime.engine.turns import EngineLoop
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.transfer.config import TransferConfig, TransferError
from kvferry_runtime.transfer.service import TransferService
from kvferry_service import exits, logs
from kvferry_service.key_files import secret_strings
from kvferry_service.parent import die_with_parent
from kvferry_wire.hashing import CompatFields

_CONFIG_BYTES = 1 << 20
_GRACE_S = 2.0
# Threads that renew leases and move KV want the interpreter for some microseconds at a time; while a step computes in
# Python each of these would wait for the interpreter's own 5 ms.
_SWITCH_S = 0.0005

_log = logs.get_logger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvferry_runtime.engine.process")
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    given = parser.parse_args()
    # A terminal's Ctrl-C reaches the whole group; the API server decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    config = messages.decode_config(sys.stdin.buffer.read(_CONFIG_BYTES))
    logs.configure("engine", json_lines=config.log_json, level=config.log_level)
    if config.keys is not None:
        logs.redact(secret_strings(config.keys))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    os.set_inheritable(given.link_fd, False)
    link = Link(socket.socket(fileno=given.link_fd), config.limits)
    process = EngineProcess(config, context, link)
    # Nothing of value is left once the server is gone, and a stopped process must go too.
    die_with_parent(given.parent_fd, process.stop, grace_s=_GRACE_S, death_signal=signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: process.stop())
    status = process.run()
    link.close(linger_s=1.0)
    context.term()
    return status


class EngineProcess:
    """One life of the engine: build, say ``Ready``, turn, close."""

    def __init__(self, config: EngineConfig, context: "zmq.Context[zmq.Socket[bytes]]", link: Link) -> None:
        self._config = config
        self._context = context
        self._link = link
        self._transfer: TransferService | None = None
        self._publisher: StatePublisher | None = None
        self._loop: EngineLoop | None = None
        self._stop_asked = False

    def stop(self) -> None:
        """From any thread, or a signal handler: end in order."""
        self._stop_asked = True
        if self._loop is not None:
            self._loop.stop()

    def run(self) -> int:
        """Returns the exit status."""
        try:
            loop, ready = self._build()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must hear why there is no engine
            _log.error("the engine cannot start: %s", error, exc_info=not _is_config_error(error))
            message = str(error) if _is_config_error(error) else repr(error)
            try:
                self._link.send(NotStarted(message=message, port_taken=exits.port_taken(error)))
            except ServerGoneError as gone:
                _log.error("%s", gone)
            self._close()
            return 2
        status = 0
        try:
            self._link.send(ready)
            self._loop = loop
            if not self._stop_asked:
                loop.run()
        except ServerGoneError as error:
            _log.error("%s", error)
            status = 1
        except Exception as error:  # noqa: BLE001 - the books may be wrong: the process ends, a new one starts clean
            _log.critical("the engine fails: %s", error, exc_info=error)
            status = 1
        self._close()
        return status

    def _build(self) -> tuple[EngineLoop, Ready]:
        import torch

        from kvferry_runtime.engine.build import build_engine

        torch.set_num_threads(self._config.threads)
        built = build_engine(self._config)
        ready, config = built.ready, self._config
        keys = config.keys
        if keys is not None and keys.kv is not None:
            self._transfer = TransferService(
                config=_transfer_config(config, ready, built.compat),
                keys=keys,
                memory=built.memory,
                post=self._link.post,
            )
            ports = self._transfer.start()
            self._publisher = StatePublisher(self._context, config.host, config.state_port, keys.state, config.limits)
            ready = msgspec.structs.replace(
                ready,
                control_port=ports.control,
                data_port=ports.data,
                state_port=self._publisher.port,
                transfer_backends=self._transfer.state().backends,
            )
        loop = EngineLoop(
            core=built.core,
            runner=built.runner,
            transfer=self._transfer,
            link=self._link,
            numbers=StateNumbers(ready.incarnation, config.limits),
            publisher=self._publisher,
        )
        return loop, ready

    def _close(self) -> None:
        if self._transfer is not None:
            self._transfer.close(_GRACE_S)
        if self._publisher is not None:
            self._publisher.close()


def _transfer_config(config: EngineConfig, ready: Ready, compat: CompatFields) -> TransferConfig:
    return TransferConfig(
        incarnation=ready.incarnation,
        epoch=ready.epoch,
        compat_hash=ready.compat_hash,
        compat=compat,
        layout=ready.layout,
        bind_host=config.host,
        advertised_host=config.advertised_host,
        control_port=config.control_port,
        data_port=config.data_port,
        checksums=config.checksums,
        limits=config.limits,
    )


def _is_config_error(error: Exception) -> bool:
    """Whether the message alone tells the user what to do."""
    return isinstance(error, (ModelError, ValueError, OSError, TransferError))


if __name__ == "__main__":
    exits.leave(main())
