"""A whole service as a user runs it: ``kvferry up`` on a manifest, in a folder, with ports and keys of its own.

Its processes are named by pod and part: a pod of engines has the parts ``server`` (the API server) and ``engine`` (its
EngineCore), the router has ``server`` alone. The service dies with the test process.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import aiohttp
import psutil
import yaml

from kvferry_cli.local.state_dir import PodRecord, ServiceRecord, StateDir
from kvferry_service.key_files import load_keys
from kvferry_wire import pod as wire_pod
from kvferry_wire import state as wire_state

START_S = 120.0  # of a service on a machine that is busy with other things
STOP_S = 60.0
POLL_S = 0.02

# Runs its arguments with the kernel's word that they end with this process, however it ends.
_DIE_WITH_US = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execv(sys.argv[1], sys.argv[1:])"
)

Pod = Literal["prefill-0", "prefill-1", "decode-0", "decode-1", "router"]
Part = Literal["server", "engine"]
ENGINE_PODS: tuple[Pod, ...] = ("prefill-0", "decode-0")  # of a service with one of each


class Service:
    """One running service. ``state`` is its state folder."""

    def __init__(self, state: StateDir, launcher: "subprocess.Popen[bytes]", output: Path) -> None:
        self.state = state
        self._launcher = launcher
        self._output = output
        self.bearer = ""

    # ---- processes ---------------------------------------------------------------------------------------------

    def record(self) -> ServiceRecord:
        """The service as its launcher last wrote it."""
        record = self.state.read_state()
        assert record is not None, f"the service has ended:\n{self.launcher_log()[-3000:]}"
        return record

    def engine_pods(self, role: str = "") -> tuple[Pod, ...]:
        """The pods that have an engine; with a role, those of it alone."""
        return tuple(
            cast(Pod, pod.name) for pod in self.record().pods if pod.role != "router" and role in ("", pod.role)
        )

    def pod(self, name: Pod) -> PodRecord:
        return next(pod for pod in self.record().pods if pod.name == name)

    def pid(self, name: Pod, part: Part = "server") -> int | None:
        """The pid of a running part; ``None`` while there is none."""
        process = self.pod(name).process
        if process is None or (found := process.process()) is None:
            return None
        if part == "server":
            return found.pid
        try:
            children = [child.pid for child in found.children() if child.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return None
        assert len(children) <= 1, f"{name} has the children {children}"
        return children[0] if children else None

    def signal(self, name: Pod, part: Part, number: signal.Signals) -> int:
        """Send a signal; returns the pid that got it."""
        pid = self.pid(name, part)
        assert pid is not None, f"{name} has no {part} now"
        os.kill(pid, number)
        return pid

    def log(self, name: Pod) -> str:
        return (self.state.logs / f"{name}.log").read_text("utf-8", "replace")

    def launcher_log(self) -> str:
        return self._output.read_text("utf-8", "replace")

    def pids(self) -> dict[tuple[Pod, Part], int | None]:
        """Of every part."""
        parts: list[tuple[Pod, Part]] = [(pod, part) for pod in self.engine_pods() for part in ("server", "engine")]
        return {(pod, part): self.pid(pod, part) for pod, part in [*parts, ("router", "server")]}

    # ---- questions ---------------------------------------------------------------------------------------------

    def url(self, name: Pod = "router") -> str:
        return f"http://127.0.0.1:{self.pod(name).ports['http']}"

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """For the internal routes: with the service's key, a new connection per request."""
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.bearer}"},
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=timeout,
        ) as session:
            yield session

    async def info(self, session: aiohttp.ClientSession, name: Pod) -> wire_pod.PodInfo:
        async with session.get(self.url(name) + "/internal/v1/info") as response:
            return wire_pod.decode_info(await response.read())

    async def load(self, session: aiohttp.ClientSession, name: Pod) -> wire_state.Load:
        """An engine's own account of now, made between two of its steps."""
        async with session.get(self.url(name) + "/internal/v1/state") as response:
            return wire_state.decode_snapshot(await response.read()).load

    async def metrics(self, session: aiohttp.ClientSession, name: Pod = "router") -> dict[str, float]:
        """Values by series, without the prefix: ``router_pods{role="decode",state="ready"}``."""
        async with session.get(self.url(name) + "/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line.removeprefix("kvferry:").rpartition(" ") for line in lines if line.startswith("kvferry:")]
        return {series: float(value) for series, _, value in found}

    async def why_not_ready(self, session: aiohttp.ClientSession) -> str:
        """Empty when every pod runs and the router uses all engines in their present life."""
        record = self.record()
        if record.state != "ready":
            return f"state {record.state}: {[(pod.name, pod.state, pod.reason) for pod in record.pods]}"
        try:
            metrics = await self.metrics(session)
            ready = sum(
                value for series, value in metrics.items() if series.startswith("router_pods{") and '"ready"' in series
            )
            if ready != len(self.engine_pods()):
                return f"the router uses {ready:g} pods"
            for name in self.engine_pods():
                async with session.get(self.url(name) + "/readyz") as response:
                    if response.status != 200:
                        return f"{name}: {await response.text()}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return repr(error)
        return ""

    async def wait_ready(self, session: aiohttp.ClientSession, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while reason := await self.why_not_ready(session):
            assert time.monotonic() < deadline, f"not ready within {seconds} s: {reason}"
            assert self._launcher.poll() is None, self.launcher_log()[-3000:]
            await asyncio.sleep(POLL_S)

    async def reborn(self, session: aiohttp.ClientSession, name: Pod, part: Part, old_pid: int) -> None:
        """Until another process does the work of the one that was killed."""

        async def why_not() -> str:
            return "" if self.pid(name, part) not in (None, old_pid) else f"{name} has no new {part}"

        await until(why_not, START_S)
        await self.wait_ready(session)

    async def why_not_idle(self, session: aiohttp.ClientSession) -> str:
        """Empty when no request, sequence, lease, pull, booking or referenced block is left anywhere."""
        held = []
        for name in self.engine_pods():
            load = await self.load(session, name)
            if (load.running, load.waiting, load.leases, load.free_blocks) != (0, 0, 0, load.total_blocks):
                held.append(f"{name}: {load}")
        return "; ".join(held)

    async def wait_idle(self, session: aiohttp.ClientSession, seconds: float) -> None:
        """Fails unless nothing is held within so many seconds, by the engines and then by the router."""
        await until(lambda: self.why_not_idle(session), seconds)
        await until(lambda: self._router_holds(session), max(2.0, seconds))  # its gauges are some tenths late

    async def _router_holds(self, session: aiohttp.ClientSession) -> str:
        metrics = await self.metrics(session)
        gauges = ("router_requests_in_flight", "router_requests_queued", "router_bookings")
        held = {name: metrics[name] for name in gauges if metrics[name]}
        return f"the router: {held}" if held else ""

    # ---- end ---------------------------------------------------------------------------------------------------

    def stop(self) -> int:
        """SIGTERM to the launcher; its exit status."""
        self._launcher.terminate()
        return self._launcher.wait(STOP_S)


async def until(why_not: Callable[[], Awaitable[str]], seconds: float) -> None:
    """Poll until no reason is left. Fails with the last one after so many seconds."""
    deadline = time.monotonic() + seconds
    while reason := await why_not():
        assert time.monotonic() < deadline, f"not within {seconds} s: {reason}"
        await asyncio.sleep(POLL_S)


@contextmanager
def running_service(folder: Path, spec: Mapping[str, Any]) -> Iterator[Service]:
    """Run a manifest of this spec until the end of the block; afterwards check that no process is left."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest, output, state = folder / "service.yaml", folder / "launcher.log", StateDir(folder / "state")
    document = {
        "apiVersion": "serving.kvferry.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "tested"},
        "spec": dict(spec),
    }
    manifest.write_text(yaml.safe_dump(document))
    argv = [sys.executable, "-c", _DIE_WITH_US, sys.executable, "-P", "-m", "kvferry_cli"]
    argv += ["up", str(manifest), "--port", "0", "--state-dir", str(state.path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "xdg")}
    with output.open("wb") as out:
        launcher = subprocess.Popen(argv, env=env, stdout=out, stderr=out, start_new_session=True)
    service = Service(state, launcher, output)
    try:
        _wait_started(service, launcher)
        yield service
    finally:
        family = psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else []
        status = service.stop()
        _, alive = psutil.wait_procs(family, 5)
        for process in alive:
            process.kill()
    assert not alive, f"left behind: {alive}"
    assert status == 0, f"exit status {status}:\n{service.launcher_log()[-3000:]}"


def _wait_started(service: Service, launcher: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while (record := service.state.read_state()) is None or record.state != "ready":
        assert launcher.poll() is None, service.launcher_log()[-3000:]
        assert time.monotonic() < deadline, f"not ready within {START_S} s:\n{service.launcher_log()[-3000:]}"
        time.sleep(0.05)
    service.bearer = load_keys(service.state.keys, need_kv=True).bearer()
