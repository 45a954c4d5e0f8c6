"""The API server process: listener, engine, routes, readiness, the ready file, and the ordered end."""

import asyncio
import importlib.metadata
import json
import os
import sys
from pathlib import Path

from aiohttp import web

from kvferry_runtime.engine.client import EngineClient
from kvferry_runtime.engine.messages import EngineConfig, Ready
from kvferry_runtime.model.folder import ModelFolder, open_folder
from kvferry_runtime.model.text import load_text_bundle
from kvferry_runtime.server.config import ServerConfig
from kvferry_runtime.server.legs import Legs
from kvferry_runtime.server.metrics import PodMetrics
from kvferry_runtime.server.pod import Pod
from kvferry_runtime.server.routes_internal import add_internal_routes
from kvferry_runtime.server.routes_openai import add_openai_routes
from kvferry_service import auth, exits, logs
from kvferry_service.errors import translator
from kvferry_service.health import add_health_routes
from kvferry_service.http_app import HttpServer, build_app, listen
from kvferry_service.key_files import load_keys, secret_strings
from kvferry_service.metrics import add_metrics_route
from kvferry_service.parent import die_with_parent
from kvferry_service.run import StopSignal
from kvferry_text.bundle import TextTools, load_text
from kvferry_text.errors import ApiError
from kvferry_wire.keys import ServiceKeys

_GRACE_S = 10.0  # from the parent's death to the hard end
_ORPHAN_S = 2.0  # without a parent nobody is left whom a drain could help
_FLUSH_S = 1.0  # and then for the others' error to be written

_ORPHANED = "the parent is gone"

_log = logs.get_logger(__name__)


async def serve(config: ServerConfig, stop: StopSignal) -> int:
    """Run one pod until it is told to stop; returns the exit status.

    Raises:
        ModelError, KeyFileError, OSError: before anything was started; the message tells what to do.
    """
    folder = open_folder(config.model)
    text = load_text(load_text_bundle(folder), config.limits)
    keys = None if config.keys_dir is None else load_keys(config.keys_dir, need_kv=True)
    if keys is not None:
        logs.redact(secret_strings(keys))
    listener = listen(config.host, config.port)
    die_with_parent(config.parent_fd, lambda: stop.set_threadsafe(_ORPHANED), grace_s=_GRACE_S)
    server = _Server(config, folder, text, keys, listener.getsockname()[1])
    http = HttpServer(server.app, config.limits, internal=keys is not None)
    await http.start(listener)
    try:
        return await server.run(stop)
    finally:
        # Answers that run are told why they end before their connections close.
        grace_s = _ORPHAN_S if stop.why == _ORPHANED else config.drain_s
        await server.pod.engine.stop_legs(grace_s, _FLUSH_S)
        await http.close()
        await server.close()


class _Server:
    def __init__(
        self, config: ServerConfig, folder: ModelFolder, text: TextTools, keys: ServiceKeys | None, port: int
    ) -> None:
        self._config = config
        self._text = text
        engine = EngineClient(_engine_config(config, folder, keys), self._on_ready)
        self.pod = Pod(
            config=config,
            engine=engine,
            metrics=PodMetrics(engine),
            model_digest=folder.digest,
            port=port,
            version=importlib.metadata.version("kvferry"),
        )
        self.app = build_pod_app(self.pod, keys)

    async def run(self, stop: StopSignal) -> int:
        engine = self.pod.engine
        engine.start()
        stopped = asyncio.create_task(stop.wait())
        engine.refused.add_done_callback(lambda _: stopped.cancel())
        await asyncio.gather(stopped, return_exceptions=True)
        if engine.refused.done():
            why = engine.refused.result()
            print(f"kvferry serve: {why.message}", file=sys.stderr)  # noqa: T201 - for who started it
            return exits.PORT_TAKEN if why.port_taken else exits.UNUSABLE
        _log.info("stopping: %s", stop.why)
        return 0

    async def close(self) -> None:
        await self.pod.engine.close()
        if self._config.ready_file is not None:
            self._config.ready_file.unlink(missing_ok=True)

    async def _on_ready(self, ready: Ready) -> None:
        """At each start of the engine: the start-up line and the ready file; at the first one requests are let in."""
        pod, config = self.pod, self._config
        if pod.text is None:
            pod.text = self._text
            pod.legs = Legs(pod.engine, pod.text, pod.metrics, config.limits, config.max_running)
        _log.info(
            "ready: %s as %s, role %s, dtype %s, %d threads (%s); %s",
            config.model,
            config.served_name,
            config.role,
            ready.dtype,
            ready.threads,
            config.threads_why,
            "; ".join(ready.reasons),
            extra=logs.fields(
                http=f"{config.host}:{pod.port}",
                control=ready.control_port,
                data=ready.data_port,
                state=ready.state_port,
                transfer=ready.transfer_backends,
                attention=ready.attention_backends,
                incarnation=ready.incarnation.hex(),
                load_s=round(ready.load_s, 2),
            ),
        )
        if config.ready_file is not None:
            _write_ready_file(config.ready_file, pod, ready)


def build_pod_app(pod: Pod, keys: ServiceKeys | None) -> web.Application:
    """The routes of a pod. Without keys: ``/v1``, health and metrics, open, which the flags allow on loopback only."""
    authenticate = auth.anyone if keys is None else auth.bearer({keys.bearer(): "router"})
    app = build_app(pod.config.limits, authenticate, translate=translator(ApiError))
    add_health_routes(app, live=pod.engine.not_live, ready=pod.not_ready)
    add_metrics_route(app, pod.metrics.registry)
    add_openai_routes(app, pod)
    if keys is not None:
        add_internal_routes(app, pod)
    return app


def _engine_config(config: ServerConfig, folder: ModelFolder, keys: ServiceKeys | None) -> EngineConfig:
    return EngineConfig(
        model=config.model,
        model_digest=folder.digest,
        dtype=config.dtype,
        attention=config.attention,
        threads=config.threads,
        block_size=config.block_size,
        kv_blocks=config.kv_blocks,
        kv_memory=config.kv_memory,
        max_model_len=config.max_model_len,
        max_running=config.max_running,
        token_budget=config.token_budget,
        prefix_caching=config.prefix_caching,
        checksums=config.checksums,
        host=config.host,
        advertised_host=config.advertised_host,
        control_port=config.control_port,
        data_port=config.data_port,
        state_port=config.state_port,
        keys=keys,
        limits=config.limits,
        log_json=config.log_json,
        log_level=config.log_level,
    )


def _write_ready_file(path: Path, pod: Pod, ready: Ready) -> None:
    """Appears whole, and again after each restart of the engine."""
    ports = pod.ports(ready)
    content = {
        "pid": os.getpid(),
        "engine_pid": pod.engine.pid,
        "host": pod.config.host,
        "http": ports.http,
        "control": ports.control,
        "data": ports.data,
        "state": ports.state,
        "role": pod.config.role,
        "model": pod.config.served_name,
        "incarnation": ready.incarnation.hex(),
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content))
    draft.replace(path)
