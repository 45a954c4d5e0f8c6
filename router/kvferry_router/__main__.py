"""``python -m kvferry_router``: one router process."""

import asyncio
import ipaddress
import os
import random
import socket
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import msgspec

from kvferry_router.app import RouterApp
from kvferry_router.config import ConfigError, RouterConfig, parse_config
from kvferry_router.discovery.api_server import AccessError, ApiServer, in_cluster
from kvferry_router.discovery.cluster import ClusterPods
from kvferry_router.discovery.endpoints import Discovery
from kvferry_router.discovery.static import FilePods, PodsFile
from kvferry_router.discovery.watch import PodWatch
from kvferry_router.given import IdBudget
from kvferry_router.key_source import ApiKeys
from kvferry_router.metrics import RouterMetrics
from kvferry_router.pod_client import PodClient
from kvferry_router.pool import PodPool
from kvferry_router.proxy import Background, Proxy
from kvferry_router.resumes import ResumeBudget, Suspects
from kvferry_router.select.pairing import PairingNews
from kvferry_router.tenants import KeyFileError, default_tenant
from kvferry_router.text_service import TextService
from kvferry_service import exits, logs, run
from kvferry_service import key_files as service_keys
from kvferry_service.http_app import HttpServer, is_loopback, listen
from kvferry_service.metrics import make_registry
from kvferry_service.parent import die_with_parent
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.limits import DEFAULT_LIMITS, Limits
from kvferry_wire.pod import Role

_GRACE_S = 14.0  # from the parent's death to the hard end
_ABORT_GRACE_S = 1.0
_API_KEYS_EVERY_S = 1.0
_UNPAIRED_EVERY_S = 10.0
_log = logs.get_logger("kvferry_router")


async def serve(config: RouterConfig, stop: run.StopSignal, limits: Limits = DEFAULT_LIMITS) -> int:
    """Run a router until it is told to stop.

    Raises:
        service_keys.KeyFileError, KeyFileError: a key file cannot be used.
        AccessError: pods are to be watched in a cluster, and this is none.
        OSError: the address cannot be listened on.
    """
    keys = service_keys.load_keys(config.keys_dir, need_kv=False)
    logs.redact(service_keys.secret_strings(keys))
    api_keys = None if config.api_keys_file is None else ApiKeys(config.api_keys_file, limits.tenants)
    metrics = RouterMetrics(make_registry())
    text = TextService(limits, config.model_name, keys.hash)
    background = Background()
    listeners = _listeners(config)
    try:
        async with PodClient(keys, limits) as client:
            pool = _pool(config, limits)
            for role in get_args(Role):
                metrics.pods_unpaired.labels(role).set_function(partial(_unpaired, pool, role))
            watch = PodWatch(
                discovery=_discovery(config, limits, metrics),
                pool=pool,
                client=client,
                text=text,
                state_key=keys.state,
                limits=limits,
                metrics=metrics,
            )
            app = RouterApp(
                proxy=_proxy(
                    config, limits, pool=pool, client=client, watch=watch, background=background, metrics=metrics
                ),
                text=text,
                keys=keys,
                model=config.model_name,
                deadline_s=config.request_deadline_s,
                authenticate=default_tenant if api_keys is None else api_keys.authenticate,
                why_closed=_open_door if api_keys is None else api_keys.why_closed,
            )
            server = HttpServer(app.build(), limits, internal=False)
            await server.start(*listeners)
            tasks = [asyncio.create_task(watch.run(), name="watch"), asyncio.create_task(app.move(), name="mover")]
            tasks.append(asyncio.create_task(_tell_unpaired(pool), name="unpaired pods"))
            if api_keys is not None:
                tasks.append(asyncio.create_task(_reload(api_keys, metrics), name="api keys"))
            port = listeners[0].getsockname()[1]
            _announce(config, port, keys, api_keys)
            try:
                await _until_stopped(stop, tasks)
            finally:
                server.drain()
                await app.stop(config.drain_s)
                await server.close()
                await background.close(_ABORT_GRACE_S)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        text.close()
        for listener in listeners:
            listener.close()
    _log.info("stopped", extra=logs.fields(why=stop.why))
    return 0


def _pool(config: RouterConfig, limits: Limits) -> PodPool:
    return PodPool(
        limits=limits,
        policy=config.policy(),
        model=config.model_name,
        rng=random.Random(int.from_bytes(os.urandom(8))),
        must_ferry=config.transfer_failure == "fail",
    )


async def _tell_unpaired(pool: PodPool) -> None:
    """A line in the log for each pod that stays without a partner."""
    news = PairingNews()
    while True:
        for one in news.look(pool.unpaired()):
            fields = logs.fields(pod=one.pod, beside=one.beside, why=one.why)
            _log.warning("no pod of the other role has its compat hash", extra=fields)
        await asyncio.sleep(_UNPAIRED_EVERY_S)


def _unpaired(pool: PodPool, role: Role) -> int:
    return sum(one.role == role for one in pool.unpaired())


def _proxy(
    config: RouterConfig,
    limits: Limits,
    *,
    pool: PodPool,
    client: PodClient,
    watch: PodWatch,
    background: Background,
    metrics: RouterMetrics,
) -> Proxy:
    """What performs the flows, with the budgets that they share."""
    id_budget = IdBudget(limits)
    metrics.resume_ids.set_function(lambda: id_budget.held)
    loop = asyncio.get_running_loop()
    metrics.pairs_barred.set_function(lambda: len(pool.barred(loop.time())))
    return Proxy(
        pool=pool,
        client=client,
        watch=watch,
        metrics=metrics,
        limits=limits,
        background=background,
        failure_policy=config.transfer_failure,
        id_budget=id_budget,
        resumes=ResumeBudget(limits),
        suspects=Suspects(limits),
    )


async def _until_stopped(stop: run.StopSignal, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the stop signal; a task that ends before it has failed, and so has the router."""
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
    finally:
        stopping.cancel()


def _listeners(config: RouterConfig) -> list[socket.socket]:
    """The address that is asked for; in a cluster the pod's loopback too, where ``kubectl port-forward`` arrives."""
    listeners = [listen(config.host, config.port)]
    anywhere = ipaddress.ip_address(config.host).is_unspecified if config.host != "localhost" else False
    if config.services is not None and not anywhere and not is_loopback(config.host):
        try:
            listeners.append(listen("127.0.0.1", listeners[0].getsockname()[1]))
        except OSError:
            listeners[0].close()
            raise
    return listeners


def _discovery(config: RouterConfig, limits: Limits, metrics: RouterMetrics) -> Discovery:
    if config.services is None:
        assert config.pods_file is not None, "the configuration has one or the other"
        return FilePods(PodsFile(config.pods_file, limits.pods), limits.pod_poll_s)
    api = ApiServer(in_cluster(config.service_account_dir), limits, f"kvferry-router/{version('kvferry')}")
    rng = random.Random(int.from_bytes(os.urandom(8)))
    return ClusterPods(api, config.services, family=config.family(), limits=limits, metrics=metrics, rng=rng)


def _open_door() -> str:
    return ""


async def _reload(api_keys: ApiKeys, metrics: RouterMetrics) -> None:
    complaint = ""
    while True:
        metrics.api_keys.set(len(api_keys))
        metrics.api_keys_stale.set(api_keys.stale)
        await asyncio.sleep(_API_KEYS_EVERY_S)
        try:
            if api_keys.reload():
                complaint = ""
                _log.info("API keys read again", extra=logs.fields(keys=len(api_keys)))
        except KeyFileError as error:
            if complaint != str(error):  # told once, not at each look
                complaint = str(error)
                _log.error("API keys cannot be read; the old ones stay", extra=logs.fields(reason=complaint))


def _announce(config: RouterConfig, port: int, keys: ServiceKeys, api_keys: ApiKeys | None) -> None:
    if config.auth == "none" and not is_loopback(config.host):
        _log.warning("anybody who reaches this address is served: --auth none", extra=logs.fields(host=config.host))
    _log.info(
        "router listening",
        extra=logs.fields(
            service=config.service_name,
            model=config.model_name,
            host=config.host,
            port=port,
            auth=config.auth,
            api_keys=None if api_keys is None else len(api_keys),
            hash_key=keys.hash_key_id(),
            disaggregate=config.disaggregate,
            min_tokens=config.disaggregate_min_tokens,
            max_cached_share=config.disaggregate_max_cached_share,
            deadline_s=config.request_deadline_s,
            transfer_failure=config.transfer_failure,
        ),
    )
    if config.ready_file is not None:
        _write_ready(config.ready_file, {"host": config.host, "port": port, "pid": os.getpid()})


def _write_ready(path: Path, content: dict[str, object]) -> None:
    """Write a file that appears whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(content))
    draft.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router; returns the exit status, of ``kvferry_service.exits``."""
    try:
        config = parse_config(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        sys.stderr.write(f"kvferry_router: {error}\n")
        return exits.UNUSABLE
    logs.configure("router", json_lines=config.log_json)

    async def body(stop: run.StopSignal) -> int:
        die_with_parent(config.parent_fd, lambda: stop.set_threadsafe("the parent is gone"), grace_s=_GRACE_S)
        return await serve(config, stop)

    try:
        return run.run(body)
    except (AccessError, service_keys.KeyFileError, KeyFileError, OSError, ValueError) as error:
        sys.stderr.write(f"kvferry_router: {error}\n")
        return exits.exit_status(error)


if __name__ == "__main__":
    sys.exit(main())
