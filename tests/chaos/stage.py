"""One stage of a run: a service in namespaces, clients beside it, faults from a schedule, and what was seen."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.chaos.asked import Orders, Record
from tests.chaos.faults import Injector
from tests.chaos.judge import Evidence
from tests.chaos.namespaces import OBSERVER, Network
from tests.chaos.schedule import Fault, Kind, Topology
from tests.chaos.service import ROOT, ChaosService, Death, Held, RouterHeld, plan_of, topology_of, until

CLIENTS = "clients"
START_S = 240.0
BEFORE_S = 2.0  # of traffic without a fault
SETTLE_S = 1.5  # for all to notice what the last fault has done
HEAL_S = 240.0  # for every pod to be ready after the last fault, however busy the machine is
CALM_S = 4.0  # of traffic after that
REST_S = 40.0  # for what is held to be given back
DEADLINE_S = 40.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage runs."""

    name: str
    spec: dict[str, Any]  # of the manifest
    model: str  # where pods find the model
    routers: int
    clients: int
    prompts: tuple[str, ...] = ()
    max_tokens: int = 40

    @property
    def topology(self) -> Topology:
        return topology_of(plan_of(self.spec), self.routers)


def run_stage(plan: Plan, schedule: tuple[Fault, ...], seed: int, folder: Path, say: Callable[[str], None]) -> Evidence:
    """Run it to its end. Namespaces and processes are gone afterwards, whatever happens."""
    nodes, joined = ChaosService.nodes(plan.topology)
    with Network([*nodes, CLIENTS], joined) as network, network.within(OBSERVER):
        return asyncio.run(_run(plan, schedule, seed, folder, network, say))


async def _run(
    plan: Plan, schedule: tuple[Fault, ...], seed: int, folder: Path, network: Network, say: Callable[[str], None]
) -> Evidence:
    loop = asyncio.get_running_loop()
    limits_memory = any(fault.kind is Kind.OOM_KILL for fault in schedule)
    service = ChaosService(network, plan_of(plan.spec), plan.topology, plan.model, folder, limits_memory)
    async with service:
        if reason := await until(service.why_not_ready, START_S):
            raise RuntimeError(f"{plan.name}: not ready within {START_S:g} s: {reason}; logs in {folder}")
        say(f"{plan.name}: ready, {plan.clients} clients, {len(schedule)} faults")
        urls = {name: service.url(name) for name in plan.topology.routers}
        clients = Clients(network, plan, seed, urls, folder / "records.jsonl")
        async with clients:
            await asyncio.sleep(BEFORE_S)
            begun_at = loop.time()
            injector = Injector(service, say)
            await injector.perform(schedule)
            await asyncio.sleep(SETTLE_S)
            not_ready = await until(service.why_not_ready, HEAL_S)
            calm_at = loop.time()
            say(f"{plan.name}: all faults are healed, {not_ready or 'every pod is ready'}")
            await asyncio.sleep(CALM_S)
            left = await clients.finish()
        held, router_held = await _rest(service)
        return Evidence(
            records=clients.records,
            applied=injector.applied,
            deaths=_without_pairs(service.deaths),
            hits=service.hits,
            memory=service.memory,
            held=held,
            router_held=router_held,
            tracebacks=service.tracebacks(),
            not_ready=not_ready,
            left_clients=left,
            begun_at=begun_at,
            calm_at=calm_at,
            ended_at=loop.time(),
            deadline_s=DEADLINE_S,
        )


async def _rest(service: ChaosService) -> tuple[list[Held], list[RouterHeld]]:
    """What is held once nothing is asked any more, at the latest look of those that it takes to come to rest."""
    found: tuple[list[Held], list[RouterHeld]] = ([], [])

    async def why_not() -> str:
        nonlocal found
        try:
            found = (await service.held(), await service.router_held())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return repr(error)
        busy = [each for each in found[0] if each.running or each.waiting or each.leases]
        busy_routers = [each for each in found[1] if any(each.gauges.values())]
        used = [each for each in found[0] if each.free_blocks != each.total_blocks]
        return f"{busy} {busy_routers} {used}" if busy or busy_routers or used else ""

    await until(why_not, REST_S)
    return found


def _without_pairs(deaths: list[Death]) -> list[Death]:
    """A pod's engine ends with its server: that is one death."""
    servers = {(each.pod, each.at) for each in deaths if each.part == "server"}
    return [each for each in deaths if each.part == "server" or (each.pod, each.at) not in servers]


class Clients:
    """The clients' process."""

    def __init__(self, network: Network, plan: Plan, seed: int, urls: dict[str, str], file: Path) -> None:
        """``file``: where the records are kept, too."""
        self._file = file
        self._argv = network.inside(CLIENTS, [sys.executable, "-m", "tests.chaos.clients"])
        self._orders = Orders(
            routers=urls,
            clients=plan.clients,
            seed=seed,
            model=str(plan.spec["model"]["name"]),
            source=plan.model,
            deadline_s=DEADLINE_S,
            prompts=plan.prompts,
            max_tokens=plan.max_tokens,
        )
        self.records: list[Record] = []

    async def __aenter__(self) -> "Clients":
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._orders) + b"\n")
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with self._file.open("wb") as kept:
            while line := await self._process.stdout.readline():
                kept.write(line)
                self.records.append(msgspec.json.decode(line, type=Record))

    async def finish(self) -> bool:
        """Ask nothing more and read what is under way; returns whether some never came to an end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), DEADLINE_S + 30)
            await self._reading
        except TimeoutError:
            return True
        return self._process.returncode != 0

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._reading.cancel()


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
