"""A service in namespaces: the pods of a manifest's own plan, each in a namespace, started, watched and harmed here.

It is a `faults.Plant`. As a kubelet would, it starts again what ends without being told to; the judge will ask why.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from kvferry_operator.api import load_manifest
from kvferry_operator.plan import Observed, PodPlan, ServicePlan, Slot, plan
from kvferry_service.key_files import copy_keys, create_keys, load_keys
from kvferry_service.parent import Child, own_module, spawn
from kvferry_wire import pod as wire_pod
from kvferry_wire import state as wire_state
from tests.chaos.cgroups import MemoryGroup
from tests.chaos.faults import Part
from tests.chaos.namespaces import LinkRule, Network
from tests.chaos.schedule import Topology
from tests.chaos.wire import Hit, Spoil

ROOT = Path(__file__).parents[2]
PORTS = {Slot.HTTP_PORT: 8000, Slot.CONTROL_PORT: 5600, Slot.DATA_PORT: 5601, Slot.STATE_PORT: 5557}
WATCH_S = 0.1
SAMPLE_S = 2.0
AGAIN_S = 0.5  # until what ended by itself is started again
STOP_S = 40.0
ASK_S = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended."""

    pod: str
    part: Part
    at: float  # time.monotonic
    status: int | None  # of a server; negative: the signal
    asked: bool  # by SIGTERM of a fault


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of its own that one process holds at one time."""

    pod: str
    part: Part
    pid: int
    at: float
    nbytes: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself at rest; all counts are to be 0, and all blocks free."""

    pod: str
    running: int
    waiting: int
    leases: int
    free_blocks: int
    total_blocks: int


class RouterHeld(msgspec.Struct, frozen=True, kw_only=True):
    """What a router says of itself at rest."""

    pod: str
    gauges: dict[str, float]


def topology_of(service_plan: ServicePlan, routers: int) -> Topology:
    """The names of a plan's pods, and of as many routers."""
    return Topology(
        prefill=tuple(pod.name for pod in service_plan.of_role("prefill")),
        decode=tuple(pod.name for pod in service_plan.of_role("decode")),
        routers=tuple(f"router-{number}" for number in range(routers)),
    )


def plan_of(spec: Mapping[str, Any]) -> ServicePlan:
    """What the product makes of a manifest with this spec."""
    document = {
        "apiVersion": "serving.kvferry.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chaos"},
        "spec": dict(spec),
    }
    return plan(load_manifest(yaml.safe_dump(document), "chaos"), Observed())


def wire_of(prefill: str) -> str:
    """The node that a prefill pod's KV comes from."""
    return f"wire-{prefill.rpartition('-')[2]}"


@dataclass
class Seat:
    """A pod's place: what is started there, and what runs there now."""

    name: str
    argv: list[str]
    log: Path
    env: dict[str, str]
    memory: MemoryGroup | None = None  # where its memory can be limited
    child: Child | None = None
    engine: int | None = None  # its pid
    wanted: bool = True  # it is started again when it ends
    asked: bool = False  # it was told to end
    starts: int = 0

    @property
    def pid(self) -> int | None:
        """Of the server; ``None`` while there is none."""
        return None if self.child is None or self.child.process.returncode is not None else self.child.pid


@dataclass
class ChaosService:
    """See above. Everything runs on one event loop, in the observer's namespace."""

    network: Network
    plan: ServicePlan
    topology: Topology
    model: str  # the model as a folder, or the toy's name
    folder: Path
    limits_memory: bool  # each pod has a group of its own, for `exhaust`
    deaths: list[Death] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    _seats: dict[str, Seat] = field(default_factory=dict)
    _wires: dict[str, "asyncio.subprocess.Process"] = field(default_factory=dict)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    @staticmethod
    def nodes(topology: Topology) -> tuple[list[str], list[tuple[str, str]]]:
        """Names of the namespaces, and those that are one pod."""
        joined = [(pod, wire_of(pod)) for pod in topology.prefill]
        return [*topology.pods, *(wire for _, wire in joined)], joined

    # ---- life --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "ChaosService":
        self.folder.mkdir(parents=True, exist_ok=True)
        create_keys(self.folder / "keys")
        copy_keys(self.folder / "keys", self.folder / "router-keys", ("http", "state", "hash"))
        bearer = load_keys(self.folder / "keys", need_kv=True).bearer()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {bearer}"},
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=ASK_S),
        )
        self._write_pods_file()
        self._make_seats()
        try:
            for pod in self.topology.prefill:
                await self._start_wire(pod)
            for seat in self._seats.values():
                self._start(seat)
            self._tasks += [asyncio.create_task(self._watch()), asyncio.create_task(self._sample())]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for seat in self._seats.values():
            seat.wanted = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        for seat in self._seats.values():
            if seat.child is not None:
                await asyncio.to_thread(seat.child.stop, 0.0)
        for wire in self._wires.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                wire.kill()
            await wire.wait()

    def _write_pods_file(self) -> None:
        pods = [
            {
                "name": name,
                "role": role,
                "host": self.network.address(name),
                "http": PORTS[Slot.HTTP_PORT],
                "state": PORTS[Slot.STATE_PORT],
            }
            for role, names in (("prefill", self.topology.prefill), ("decode", self.topology.decode))
            for name in names
        ]
        (self.folder / "pods.json").write_bytes(msgspec.json.encode({"pods": pods}))

    def _make_seats(self) -> None:
        (router,) = self.plan.of_role("router")
        plans = {pod.name: pod for pod in self.plan.pods if pod.role != "router"}
        plans |= dict.fromkeys(self.topology.routers, router)
        for name, pod in plans.items():
            seat = Seat(name, self._argv(name, pod), self.folder / f"{name}.log", self._env(pod))
            seat.memory = MemoryGroup(self.network.identity, name) if self.limits_memory else None
            self._seats[name] = seat

    def _argv(self, name: str, pod: PodPlan) -> list[str]:
        values = {slot: str(port) for slot, port in PORTS.items()} | {
            Slot.HOST: self.network.address(name),
            Slot.MODEL: self.model,
            Slot.KEYS_DIR: str(self.folder / ("router-keys" if pod.role == "router" else "keys")),
            Slot.PODS_FILE: str(self.folder / "pods.json"),
        }
        own = ["--advertise-host", self.network.address(wire_of(name))] if pod.role == "prefill" else []
        return self.network.inside(name, [*own_module(pod.module), *pod.rendered(values), *own, "--log-format", "json"])

    def _env(self, pod: PodPlan) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **dict(pod.env)}

    async def _start_wire(self, pod: str) -> None:
        wire = wire_of(pod)
        ends = [self.network.address(wire), self.network.address(pod)]
        ports = [str(PORTS[Slot.CONTROL_PORT]), str(PORTS[Slot.DATA_PORT])]
        argv = self.network.inside(wire, [sys.executable, "-m", "tests.chaos.wire", *ends, *ports])
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._wires[pod] = process
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"listening\n"
        self._tasks.append(asyncio.create_task(self._read_hits(process.stdout)))

    async def _read_hits(self, output: asyncio.StreamReader) -> None:
        while line := await output.readline():
            self.hits.append(msgspec.json.decode(line, type=Hit))

    def _start(self, seat: Seat) -> None:
        seat.asked, seat.wanted = False, True
        seat.starts += 1
        with seat.log.open("ab") as log:
            seat.child = spawn(seat.argv, env=seat.env, cwd=self.folder, stdout=log, stderr=log, new_session=True)
        if seat.memory is not None:
            seat.memory.take(seat.child.pid)

    # ---- watching ----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            for seat in self._seats.values():
                self._look(seat)
            await asyncio.sleep(WATCH_S)

    def _look(self, seat: Seat) -> None:
        """Note what has ended since the last look."""
        now = asyncio.get_running_loop().time()
        if seat.child is not None and (status := seat.child.process.poll()) is not None:
            if seat.engine is not None:
                self.deaths.append(Death(pod=seat.name, part="engine", at=now, status=None, asked=seat.asked))
            self.deaths.append(Death(pod=seat.name, part="server", at=now, status=status, asked=seat.asked))
            seat.child.let_go()
            seat.child = seat.engine = None
            if seat.wanted:
                asyncio.get_running_loop().call_later(AGAIN_S, self._start_if_wanted, seat)
        elif seat.child is not None and (engine := _engine_of(seat.child.pid)) != seat.engine:
            if seat.engine is not None:
                self.deaths.append(Death(pod=seat.name, part="engine", at=now, status=None, asked=seat.asked))
            seat.engine = engine

    def _start_if_wanted(self, seat: Seat) -> None:
        if seat.wanted and seat.child is None:
            self._start(seat)

    async def _sample(self) -> None:
        samples = self.folder / "memory.jsonl"
        with samples.open("wb") as kept:
            while True:
                now = asyncio.get_running_loop().time()
                for seat in self._seats.values():
                    parts: tuple[tuple[Part, int | None], ...] = (("server", seat.pid), ("engine", seat.engine))
                    for part, pid in parts:
                        if pid is not None and (nbytes := _own_memory(pid)):
                            self.memory.append(Memory(pod=seat.name, part=part, pid=pid, at=now, nbytes=nbytes))
                            kept.write(msgspec.json.encode(self.memory[-1]) + b"\n")
                await asyncio.sleep(SAMPLE_S)

    # ---- harm (faults.Plant) -------------------------------------------------------------------------------------

    async def kill(self, pod: str, part: Part) -> bool:
        seat = self._seats[pod]
        self._look(seat)
        pid = seat.pid if part == "server" else seat.engine
        if pid is None:
            return False
        if part == "server":
            seat.wanted = False
        child = seat.child
        os.kill(pid, signal.SIGKILL)  # the kernel ends a pod's engine with its server
        while part == "server" and seat.child is child:  # not the next one, which another fault may start
            self._look(seat)
            await asyncio.sleep(WATCH_S / 4)
        return True

    async def exhaust(self, pod: str) -> bool:
        seat = self._seats[pod]
        assert seat.memory is not None, "memory cannot be limited here: no fault needs it"
        self._look(seat)
        return seat.engine is not None and await seat.memory.exhaust()

    async def stop(self, pod: str) -> bool:
        seat = self._seats[pod]
        if seat.pid is None:
            return False
        seat.wanted, seat.asked = False, True
        os.kill(seat.pid, signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + STOP_S
        child = seat.child
        while child is not None and seat.child is child:
            if asyncio.get_running_loop().time() > deadline:
                child.process.kill()
            await asyncio.sleep(WATCH_S)
        return True

    async def start(self, pod: str) -> None:
        if self._seats[pod].child is None:
            self._start(self._seats[pod])

    async def pause(self, pod: str, part: Part) -> tuple[int, ...]:
        seat = self._seats[pod]
        self._look(seat)
        if part == "engine" and not await self._is_ready(pod):
            return ()  # one that is still loading may do so for long
        pids = (seat.engine,) if part == "engine" else (seat.pid, seat.engine)
        found = tuple(pid for pid in pids if pid is not None)
        for pid in found:
            _send(pid, signal.SIGSTOP)
        return found

    async def resume(self, paused: tuple[int, ...]) -> None:
        for pid in paused:
            if any(pid in (seat.pid, seat.engine) for seat in self._seats.values()):
                _send(pid, signal.SIGCONT)

    async def links(self, rules: Iterable[LinkRule]) -> None:
        await self.network.apply([each for rule in rules for each in self._widened(rule)])

    def _widened(self, rule: LinkRule) -> list[LinkRule]:
        """A prefill pod is two nodes, itself and its wire; the link between them is never harmed."""
        return [
            msgspec.structs.replace(rule, source=source, target=target)
            for source in self._nodes_of(rule.source)
            for target in self._nodes_of(rule.target)
        ]

    def _nodes_of(self, name: str) -> tuple[str, ...]:
        return (name, wire_of(name)) if name in self.topology.prefill else (name,)

    async def spoil(self, pod: str, spoil: Spoil) -> None:
        stdin = self._wires[pod].stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(spoil) + b"\n")
        await stdin.drain()

    # ---- questions -----------------------------------------------------------------------------------------------

    def url(self, name: str) -> str:
        return f"http://{self.network.address(name)}:{PORTS[Slot.HTTP_PORT]}"

    async def _get(self, name: str, path: str) -> bytes:
        async with self._session.get(self.url(name) + path) as response:
            body = await response.read()
            if response.status != 200:
                raise aiohttp.ClientError(f"{name}{path}: {response.status} {body[:200]!r}")
            return body

    async def metrics(self, name: str) -> dict[str, float]:
        """Values by series, without the prefix."""
        lines = (await self._get(name, "/metrics")).decode().splitlines()
        found = [line.removeprefix("kvferry:").rpartition(" ") for line in lines if line.startswith("kvferry:")]
        return {series: float(value) for series, _, value in found}

    async def info(self, name: str) -> wire_pod.PodInfo:
        return wire_pod.decode_info(await self._get(name, "/internal/v1/info"))

    async def _is_ready(self, pod: str) -> bool:
        try:
            await self._get(pod, "/readyz")
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def why_not_ready(self) -> str:
        """Empty when every pod is ready and every router uses all of them."""
        for name in self.topology.pods:
            try:
                await self._get(name, "/readyz")
                if name in self.topology.routers:
                    ready = sum(
                        value
                        for series, value in (await self.metrics(name)).items()
                        if series.startswith("router_pods{") and '"ready"' in series
                    )
                    if ready != len(self.topology.engines):
                        return f"{name} uses {ready:g} pods"
            except (aiohttp.ClientError, TimeoutError) as error:
                return f"{name}: {error!r}"
        return ""

    async def held(self) -> list[Held]:
        """Of each engine."""
        found = []
        for name in self.topology.engines:
            load = wire_state.decode_snapshot(await self._get(name, "/internal/v1/state")).load
            counts = {each: getattr(load, each) for each in Held.__struct_fields__ if each != "pod"}
            found.append(Held(pod=name, **counts))
        return found

    async def router_held(self) -> list[RouterHeld]:
        """Of each router."""
        names = ("router_requests_in_flight", "router_requests_queued", "router_bookings", "router_resume_ids")
        metrics = {router: await self.metrics(router) for router in self.topology.routers}
        return [
            RouterHeld(pod=router, gauges={name: found[name] for name in names}) for router, found in metrics.items()
        ]

    def tracebacks(self) -> list[str]:
        """What the pods' logs tell of exceptions that nobody expected, by pod."""
        return [
            f"{seat.name}: {line[:1500]}"
            for seat in self._seats.values()
            for line in seat.log.read_text("utf-8", "replace").splitlines()
            if "Traceback" in line
        ]


def _engine_of(server: int) -> int | None:
    """The pid of a server's one child."""
    try:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    except OSError:  # it has ended
        return None
    return int(children[0]) if children else None


def _own_memory(pid: int) -> int:
    """Bytes of resident memory that is of no file: what the kernel takes back and reads again is not counted.

    0 when the process is gone.
    """
    try:
        _, resident, of_files, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - of_files) * _PAGE
    except (OSError, ValueError):
        return 0


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended before the signal


async def until(why_not: Callable[[], Awaitable[str]], seconds: float) -> str:
    """Poll until no reason is left; returns the last one if there is still one after so many seconds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while reason := await why_not():
        if asyncio.get_running_loop().time() > deadline:
            return reason
        await asyncio.sleep(0.2)
    return ""
