"""One side of a comparison as a running service: the launcher of ``kvferry up``, inside this process."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvferry_cli.bench.manifests import Side
from kvferry_cli.bench.usage import Metrics, parse_metrics, pods_in_use
from kvferry_cli.errors import UserError
from kvferry_cli.local.identity import ProcessId, kill_trees
from kvferry_cli.local.launcher import Launcher
from kvferry_cli.local.logs import Screen
from kvferry_cli.local.pod import LocalPod
from kvferry_cli.local.ports import HOST
from kvferry_cli.local.service import prepare
from kvferry_cli.local.state_dir import PodRecord, ServiceRecord, StateDir
from kvferry_cli.local.supervisor import Policy
from kvferry_operator.plan import ServicePlan
from kvferry_wire.pod import PodInfo

if TYPE_CHECKING:
    import aiohttp

STOP_S = 60.0
IDLE_S = 30.0  # in which pods must have let go of cut streams
HEARTBEAT_S = 1.2  # after which a pod's counters hold all that was before
POLL_S = 0.1
TENANT = "bench"


def write_client_key(file: Path) -> str:
    """Draw the load generator's API key; the file gets its digest, as a router reads it."""
    key = secrets.token_urlsafe(32)
    file.write_text(f"{TENANT}:{sha256(key.encode()).hexdigest()}\n")
    file.chmod(0o600)
    return key


class RunningSide:
    """A service that is ready."""

    def __init__(
        self, side: Side, state: StateDir, record: ServiceRecord, pods: tuple[LocalPod, ...], plan: ServicePlan
    ) -> None:
        self.side = side
        self.endpoint = record.endpoint
        self.model = record.model
        self.engines = tuple(pod for pod in pods if pod.role != "router")
        self._router = next(pod for pod in pods if pod.role == "router")
        self.threads = {pod.name: pod.threads or 1 for pod in plan.pods if pod.role != "router"}
        self._state = state

    def record(self) -> ServiceRecord:
        """As the launcher last wrote it. Raises ``UserError`` when the service has ended, or a pod is not ready."""
        record = self._state.read_state()
        if record is None:
            raise UserError(f"the {self.side} service has ended")
        for pod in record.pods:
            if pod.state != "ready" or pod.restarts:
                raise UserError(f"{self._told(pod)}; what was measured until then does not count")
        return record

    def _told(self, pod: PodRecord) -> str:
        why = f": {pod.reason}" if pod.reason else ""
        return f"{self.side}: {pod.name} is {pod.state} after {pod.restarts} restarts{why}"

    def processes(self) -> dict[str, ProcessId | None]:
        """Of each pod, the router included. Raises ``UserError``."""
        return {pod.name: pod.process for pod in self.record().pods}

    async def wait_for_all_pods(self, http: "aiohttp.ClientSession", limit_s: float) -> None:
        """Until the router gives requests to every engine pod. Raises ``UserError``."""
        deadline = time.monotonic() + limit_s
        while (used := pods_in_use((await _get(http, self._router, "/metrics", {})).decode())) < len(self.engines):
            if time.monotonic() > deadline:
                told = f"{self.side}: after {limit_s:g} s the router uses {used} of {len(self.engines)} pods"
                raise UserError(f"{told}; the limit is --start-limit")
            await asyncio.sleep(POLL_S)

    async def metrics(self, http: "aiohttp.ClientSession") -> dict[str, Metrics]:
        """The counters of each engine pod. Raises ``UserError``."""
        return {pod.name: await self._metrics(http, pod) for pod in self.engines}

    async def settled_metrics(self, http: "aiohttp.ClientSession") -> dict[str, Metrics]:
        """The counters when nothing is asked any more. Raises ``UserError`` when the pods do not let go."""
        deadline = time.monotonic() + IDLE_S
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            found = await self.metrics(http)
            held = {
                name: {gauge: values[gauge] for gauge in ("legs", "kv_leases") if values.get(gauge)}
                for name, values in found.items()
            }
            if not any(held.values()):
                return found
            if time.monotonic() > deadline:
                raise UserError(f"{self.side}: {IDLE_S:g} s after the round the pods still hold {held}")

    async def infos(self, http: "aiohttp.ClientSession") -> dict[str, PodInfo]:
        """What each engine pod says of itself. Raises ``UserError``."""
        from kvferry_service.key_files import load_keys
        from kvferry_wire.pod import decode_info

        bearer = {"authorization": f"Bearer {load_keys(self._state.keys, need_kv=True).bearer()}"}
        found = {}
        for pod in self.engines:
            text = await _get(http, pod, "/internal/v1/info", bearer)
            found[pod.name] = decode_info(text)
        return found

    async def _metrics(self, http: "aiohttp.ClientSession", pod: LocalPod) -> Metrics:
        return parse_metrics((await _get(http, pod, "/metrics", {})).decode())


async def _get(http: "aiohttp.ClientSession", pod: LocalPod, path: str, headers: Mapping[str, str]) -> bytes:
    import aiohttp

    try:
        async with http.get(f"http://{HOST}:{pod.ports['http']}{path}", headers=headers) as response:
            response.raise_for_status()
            return await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UserError(f"{pod.name}: {path}: {str(error) or type(error).__name__}") from None


@contextlib.asynccontextmanager
async def running(
    side: Side,
    plan: ServicePlan,
    folder: Path,
    *,
    manifest: Path,
    model: str,
    cores: Mapping[str, tuple[int, ...]],
    start_s: float,
) -> AsyncIterator[RunningSide]:
    """Run a plan's pods until the end of the block.

    Args:
        folder: its state folder; keys, ports and logs.
        cores: of each engine pod; others may run anywhere.
        start_s: until all pods must be ready.

    Raises:
        UserError: it cannot be started, or a pod never gets ready.
    """
    state = StateDir(folder)
    state.create()
    state.lock()
    prepared = prepare(plan, state, manifest=manifest, model=model, port=0)
    pods = tuple(msgspec.structs.replace(pod, cores=cores.get(pod.name, ())) for pod in prepared.pods)
    with state.launcher_log.open("w") as log:
        screen = Screen([pod.name for pod in pods], log, quiet=True)
        ready = asyncio.Event()
        launcher = Launcher(pods, state, prepared.record, screen, Policy(give_up_after=1), on_ready=ready.set)
        run = asyncio.create_task(launcher.run(signals=False))
        try:
            await _until_ready(side, run, ready, start_s, state)
            yield RunningSide(side, state, prepared.record, pods, plan)
            launcher.stop()
            await asyncio.wait([run], timeout=STOP_S)
        finally:
            run.cancel()  # kills what still runs; no effect once all have stopped
            await asyncio.gather(run, return_exceptions=True)
            if (record := state.read_state()) is not None:
                kill_trees(pod.process for pod in record.pods if pod.process is not None)
            screen.close()
            state.unlock()


async def _until_ready(
    side: Side, run: "asyncio.Task[object]", ready: asyncio.Event, start_s: float, state: StateDir
) -> None:
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait([run, waiting], timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if run.done():
        raise UserError(f"{side}: {getattr(run.result(), 'failure', '') or 'the service ended before it was ready'}")
    if not ready.is_set():
        record = state.read_state()
        late = [] if record is None else [pod for pod in record.pods if pod.state != "ready"]
        told = "; ".join(f"{pod.name} is {pod.state}: {pod.reason}" for pod in late)
        raise UserError(f"{side}: not ready within {start_s:g} s: {told}; the limit is --start-limit")
