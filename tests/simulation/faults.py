"""What goes wrong at a time: crashes, pauses, partitions, slow steps and the like."""

from kvferry_runtime.core.messages import Drain
from tests.simulation.fabric import Fabric
from tests.simulation.scenario import Fault
from tests.simulation.world import Process, World

# The engine's clock does not stop while its process does, so that all that was due happens at once.


GRACE_S = 6.0  # of a pod that departs


class Faults:
    """Begins and ends each fault of a scenario."""

    def __init__(self, world: World, fabric: Fabric) -> None:
        self._world = world
        self._fabric = fabric

    def plan(self, faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            self._world.at(fault.at, None, self._begin, (fault,))

    def _begin(self, fault: Fault) -> None:
        self._world.count(f"fault_{fault.kind}")
        self._world.log(fault.target, "", f"FAULT {fault.kind} for {fault.seconds:.2f} s {fault.other}")
        getattr(self, fault.kind)(fault)

    def _after(self, seconds: float, run: object, *args: object) -> None:
        assert callable(run)
        self._world.at(self._world.now + seconds, None, run, args)

    def crash(self, fault: Fault) -> None:
        pod = self._fabric.pods[fault.target]
        if pod.process.up:
            pod.crash()
            self._after(fault.seconds, pod.restart)

    crash_prefill = crash

    def engine_dies(self, fault: Fault) -> None:
        """The engine's process alone: the server says so to every leg, and starts another one."""
        pod = self._fabric.pods[fault.target]
        if pod.process.up and not pod.process.paused:
            pod.lose_engine()
            self._after(fault.seconds, pod.restart)

    def pause(self, fault: Fault) -> None:
        process = self._process(fault.target)
        if process.up and not process.paused:
            if (router := self._fabric.routers.get(fault.target)) is not None:
                router.pauses += 1
            else:
                self._fabric.pods[fault.target].available_since = float("inf")
            process.pause()
            self._after(fault.seconds, self._wake, process, process.generation)

    def _wake(self, process: Process, generation: int) -> None:
        if process.generation == generation:
            self._world.log(process.name, "", "wakes")
            process.wake()
            if (router := self._fabric.routers.get(process.name)) is not None:
                router.awake_since = self._world.now
            if (pod := self._fabric.pods.get(process.name)) is not None:
                pod.awake_since = self._world.now
                pod.available_since = float("inf") if pod.core.load().draining else self._world.now

    def crash_router(self, fault: Fault) -> None:
        router = self._fabric.routers[fault.target]
        if router.process.up:
            router.die()
            self._after(fault.seconds, router.restart)

    def stop_router(self, fault: Fault) -> None:
        router = self._fabric.routers[fault.target]
        if router.process.up and not router.process.paused:
            router.stop()
            self._after(0.02, self._end_router, fault)

    def _end_router(self, fault: Fault) -> None:
        self.crash_router(fault)

    def slow_steps(self, fault: Fault) -> None:
        pod = self._fabric.pods[fault.target]
        pod.slow_until = max(pod.slow_until, self._world.now + fault.seconds)

    def part(self, fault: Fault) -> None:
        self.part_one_way(fault)
        self._fabric.part(fault.other, fault.target, self._world.now + fault.seconds)

    def part_one_way(self, fault: Fault) -> None:
        self._fabric.part(fault.target, fault.other, self._world.now + fault.seconds)

    def part_control(self, fault: Fault) -> None:
        """The reader is not heard by the owner, whose bytes still come."""
        self._fabric.part(fault.target, fault.other, self._world.now + fault.seconds, kinds=("control",))

    def cut_streams(self, fault: Fault) -> None:
        for kind in ("http", "data"):
            self._fabric.cut_streams(fault.target, kind)

    def reset_cache(self, fault: Fault) -> None:
        self._fabric.pods[fault.target].reset_cache()

    def squeeze(self, fault: Fault) -> None:
        """Allocation fails: all blocks that could be given are taken by nobody in particular, for a time."""
        pod = self._fabric.pods[fault.target]
        if pod.process.up:
            pod.squeeze(fault.seconds)

    def drain(self, fault: Fault) -> None:
        pod = self._fabric.pods[fault.target]
        if pod.process.up:
            pod.available_since = float("inf")
            pod.post_later(Drain())

    def depart(self, fault: Fault) -> None:
        """It drains and ends, as told by a signal; another life follows."""
        pod = self._fabric.pods[fault.target]
        if pod.process.up and not pod.core.load().draining:
            self.drain(fault)
            pod.process.soon(0.1, pod.depart, self._world.now + GRACE_S)

    def _process(self, name: str) -> Process:
        found = self._fabric.routers.get(name) or self._fabric.pods[name]
        return found.process
