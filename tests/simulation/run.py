"""Runs one scenario to its end and judges it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.simulation.client import Client
from tests.simulation.fabric import Fabric
from tests.simulation.faults import Faults
from tests.simulation.models import MODELS
from tests.simulation.pod import Pod
from tests.simulation.router_shell import Router
from tests.simulation.scenario import FAULTY_S, Scenario
from tests.simulation.world import Clock, Process, TraceLine, Violation, World

QUIET_S = 30.0  # within so many seconds after the last fault everything has ended
_MAX_EVENTS = 60_000


@dataclass(eq=False)
class Report:
    """What came of one scenario."""

    scenario: Scenario
    violation: Violation | None
    lines: list[TraceLine]
    trace_hash: str
    counts: dict[str, int]
    events: int
    ended_at: float = 0.0
    outcomes: dict[str, str] = field(default_factory=dict)


class Simulation:
    """One world, from a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = world = World(scenario.seed)
        limits = scenario.limits
        latest = max((fault.at + fault.seconds for fault in scenario.faults), default=0.0)
        world.faulty_until = max(FAULTY_S, latest)
        self.fabric = fabric = Fabric(world, scenario.profile, limits)
        self.pods = [
            Pod(world, setup, self._clock(setup.name), fabric, limits, scenario.max_model_len)
            for setup in scenario.pods
        ]
        self.routers = [
            Router(world, name, self._clock(name), fabric, limits, scenario) for name in scenario.profile.routers
        ]
        for pod in self.pods:
            pod.start()
        for router in self.routers:
            router.start()
        process = Process(world, "client", self._clock("client"))
        self.clients = []
        models = sorted({setup.model for setup in scenario.pods})
        for request in scenario.requests:
            answers = {name: request.answers(scenario.max_model_len, MODELS[name]) for name in models}
            fabric.answers[request.name] = answers
            client = fabric.clients[request.name] = Client(request, answers, process, fabric)
            self.clients.append(client)
            world.at(request.at, process, client.start)
        Faults(world, fabric).plan(scenario.faults)

    def _clock(self, name: str) -> Clock:
        offset = self.world.rng(f"clock/{name}").uniform(0, 1e5)
        return Clock(offset, self.scenario.drift.get(name, 1.0))

    def run(self) -> Report:
        violation = None
        try:
            with _as_violation():
                self._run_to_end()
        except Violation as found:
            violation = found
            self.world.log("", found.request, f"VIOLATION {found}")
        self._count()
        return Report(
            scenario=self.scenario,
            violation=violation,
            lines=self.world.lines,
            trace_hash=self.world.trace_hash(),
            counts=self.world.counts,
            events=self.world.events,
            ended_at=self.world.now,
            outcomes={client.request.name: client.outcome for client in self.clients},
        )

    def _run_to_end(self) -> None:
        world = self.world
        end = world.faulty_until + QUIET_S + self._longest_delay()
        while world.next_time <= end:
            before = world.now
            world.step()
            if world.events > _MAX_EVENTS:
                raise Violation("livelock", f"{world.events} events by {world.now:.3f} s")
            if int(before) != int(world.now) and self._over():
                break
        self._check_end()

    def _longest_delay(self) -> float:
        profile = self.scenario.profile
        return max(profile.http.delay_s, profile.control.delay_s, profile.data.delay_s)

    def _over(self) -> bool:
        """Nothing more can happen."""
        return (
            self.world.now > self.world.faulty_until
            and not self.world.in_flight
            and all(client.outcome for client in self.clients)
            and all(router.rests and not router.view.lags() for router in self.routers)
            and all(pod.process.up and not pod.process.paused and pod.rests for pod in self.pods)
        )

    def _check_end(self) -> None:
        for client in self.clients:
            if not client.outcome:
                raise Violation("no_outcome", f"nothing was answered by {self.world.now:.1f} s", client.request.name)
        self._check_routers()
        for pod in self.pods:
            pod.core.check_integrity()
            if not pod.rests:
                raise Violation("leak", pod.leftovers())
        if self.scenario.profile.answers_all:
            for client in self.clients:
                ended_by_router = ("no_end", "refused", "stopping")  # judged above
                if client.outcome not in ("ok", "left", "over_capacity", *ended_by_router, *self._by_policy()):
                    raise Violation("failed", f"{client.outcome} though it could be answered", client.request.name)

    def _check_routers(self) -> None:
        """Only their own clients feel the death of one, and at the end each knows what the pods have."""
        died = {router.name: router.deaths > 0 for router in self.routers}
        for client in self.clients:
            if client.outcome == "refused" and not all(died.values()):
                raise Violation("cut_off", "refused, and there was a router", client.request.name)
            if client.outcome in ("no_end", "stopping") and not died[client.router]:
                raise Violation("cut_off", f"{client.outcome}, and {client.router} lives", client.request.name)
        for router in self.routers:
            if not router.rests:
                raise Violation("leak", router.leftovers(), next(iter(router.served), ""))
            if lag := router.view.lags():
                raise Violation("index", f"the index of {router.name} is not what the pods have: {lag}")

    def _by_policy(self) -> tuple[str, ...]:
        return ("transfer_failed",) if self.scenario.policy == "fail" else ()

    def _count(self) -> None:
        for pod in self.pods:
            self.world.count("preemptions", pod.preemptions + pod.core.preemptions)
        for client in self.clients:
            self.world.count(f"client_{client.outcome}")
        self.world.count("requests", len(self.clients))


@contextmanager
def _as_violation() -> Iterator[None]:
    """A core that raises has broken its own rules, which is a finding like any other."""
    try:
        yield
    except Violation:
        raise
    except Exception as error:
        raise Violation(type(error).__name__, str(error)) from error


def run_scenario(scenario: Scenario) -> Report:
    """Run it; the same scenario gives the same report."""
    return Simulation(scenario).run()
