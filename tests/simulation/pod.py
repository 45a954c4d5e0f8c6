"""A simulated pod: the real engine core with its loop, the transfer on both sides, and the server of legs, as one
process. Thin: it moves what the cores say, over links and with delays."""

from collections import deque
from typing import Any

import msgspec

from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.messages import (
    AbortLeg,
    DropLease,
    EngineEffect,
    EngineOutput,
    GrantLease,
    HandedOver,
    HoldLease,
    LeaseEnded,
    LeaseSettled,
    LeaseTaken,
    LegKey,
    Posted,
    PrefilledOut,
    ServerInput,
    StartPull,
    Submit,
)
from kvferry_runtime.core.plan import StepPlan, StepResult
from kvferry_runtime.engine.state_stream import StateNumbers
from kvferry_runtime.transfer.check import handle_fault
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import ControlReply, ControlRequest
from kvferry_wire.data import ReadRequest
from kvferry_wire.handle import KVHandle
from kvferry_wire.limits import Limits
from kvferry_wire.state import Snapshot
from tests.simulation import invariants
from tests.simulation.fabric import KEYS, Fabric, layout
from tests.simulation.links import Stream
from tests.simulation.models import MODELS, SPEC
from tests.simulation.owner_shell import OwnerShell
from tests.simulation.reader_shell import ReaderShell
from tests.simulation.scenario import BLOCK_SIZE, PodSetup
from tests.simulation.server_shell import ServerShell
from tests.simulation.toy_runner import ToyMemory, ToyRunner, check_tenants, check_writes
from tests.simulation.world import Clock, Process, Timer, Violation, World

_HOP_S = 0.0002  # between the server and the engine of a pod
_IDLE_TICK_S = 0.25


class PodProcess(Process):
    """The process that a pod lives in."""

    def __init__(self, world: World, pod: "Pod", clock: Clock) -> None:
        super().__init__(world, pod.name, clock)
        self._pod = pod

    def after_event(self) -> None:
        invariants.check_pod(self._pod)


class Pod:
    """One address; its incarnations follow each other."""

    def __init__(
        self, world: World, setup: PodSetup, clock: Clock, fabric: Fabric, limits: Limits, max_model_len: int
    ) -> None:
        self.name = setup.name
        self.setup = setup
        self.world = world
        self.fabric = fabric
        self.limits = limits
        self.process: Process = PodProcess(world, self, clock)
        self.config = CoreConfig(
            block_size=BLOCK_SIZE,
            blocks=setup.blocks + 1,
            token_budget=setup.token_budget,
            max_running=setup.max_running,
            max_model_len=setup.context or max_model_len,
            hash_key=KEYS.hash,
            kv_key=KEYS.kv or b"",
            limits=limits,
            prefix_caching=setup.prefix_caching,
            vocab_size=SPEC.vocab,
        )
        self.compat_hash = setup.model
        self.slow_until = 0.0
        self.awake_since = 0.0
        self.available_since = 0.0  # up, awake and not drained since then, or infinity
        self.preemptions = 0  # of earlier incarnations
        fabric.pods[self.name] = self

    # ---- life

    def start(self) -> None:
        """A new incarnation: new memory, new state, nothing known of the one before."""
        self.process.up = True
        self.available_since = self.awake_since = self.world.now
        self._rng = self.world.rng(f"pod/{self.name}/{self.process.generation}")
        self.incarnation = self._rng.randbytes(16)
        self.memory = ToyMemory(self.setup.blocks + 1, BLOCK_SIZE, self._rng)
        self.runner = ToyRunner(self.memory, MODELS[self.compat_hash])
        self.core = EngineCore(self.config)
        self.owner = OwnerShell(self, self.fabric, self.limits, self.fabric.profile.slow_data)
        self.reader = ReaderShell(self, self.fabric, self.limits, self.owner.own)
        self.server = ServerShell(self)
        self.touched = True  # the core, in this event
        self._inbox: deque[ServerInput | Posted] = deque()
        self._busy = False
        self._turn_due = False
        self._round_due = False
        self._ticks = 0
        self._squeezes = 0
        self._handles: dict[LegKey, KVHandle] = {}
        self.leases: dict[LegKey, int] = {}  # that were ever granted, by their prefill leg
        self._numbers = StateNumbers(self.incarnation, self.limits)
        self._deadline = Timer(self.process, self._turn)
        self._beat()

    def crash(self) -> None:
        self.available_since = float("inf")
        self.preemptions += self.core.preemptions
        self.process.die()
        self.fabric.cut_streams(self.name)

    def poisoned(self) -> None:
        """Something that it was asked for ends it."""
        self.world.count("pods_poisoned")
        self.world.log(self.name, "", "is ended by a request")
        self.crash()
        self.world.at(self.world.now + 0.7, None, self.restart)

    def lose_engine(self) -> None:
        self.available_since = float("inf")
        self.preemptions += self.core.preemptions
        self.server.fail_all("the engine failed")
        self.fabric.cut_streams(self.name, "data")
        self.process.die()

    def depart(self, until: float) -> None:
        """Drain to the end: once no leg and no lease is left, or at `until` (the world's time), whatever is left."""
        load = self.core.load()
        left = bool(self.server.legs or not self.core.idle() or load.leases)
        if left and self.world.now < until:
            self.process.soon(0.1, self.depart, until)
            return
        self.world.count("departed_too_late" if left else "departed")
        invariants.check_departure(self, until)
        self.world.log(self.name, "", f"ends, legs left: {list(self.server.legs)}")
        self.server.fail_all("the pod is stopping", "draining")
        self.crash()
        self.world.at(self.world.now + 0.5, None, self.restart)

    def restart(self) -> None:
        if not self.process.up:
            self.world.log(self.name, "", "starts again")
            self.start()

    # ---- the engine's loop

    def post(self, event: ServerInput | Posted) -> None:
        """Into the engine's inbox."""
        self._inbox.append(event)
        self._wake()

    def post_later(self, event: ServerInput) -> None:
        """From the server, which is another process."""
        self.process.soon(_HOP_S, self.post, event)

    def _wake(self) -> None:
        if not self._busy and not self._turn_due:
            self._turn_due = True
            self.process.soon(_HOP_S, self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._busy:
            return
        self.touched = True
        now = self.process.now
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, AbortLeg) and event.key in self.leases:
                self.owner.withdraw(self.leases[event.key])
            if isinstance(event, (LeaseTaken, LeaseEnded)):
                self._settled(event.lease_id)
            if isinstance(event, LeaseTaken):
                continue
            self._route(self.core.handle(self._checked(event), now))
        self._route(self.core.expire(now))
        plan, effects = self.core.schedule(now)
        self._route(effects)
        self._ticks += 1
        if plan is None:
            self._deadline.set(self.core.next_deadline)
            self._publish()
            return
        self._busy = True
        self._check_plan(plan)
        early = self._rng.random() < 0.5
        result = self.runner.step(plan) if early else None
        self.process.soon(self._step_seconds(plan), self._step_done, plan, result)

    def _settled(self, lease_id: int) -> None:
        """Whoever got the handle has done its part, or the lease is over."""
        outputs = [LeaseSettled(key=key) for key, lease in self.leases.items() if lease == lease_id]
        if outputs:
            self.process.soon(_HOP_S, self.server.on_outputs, outputs)

    def _step_done(self, plan: StepPlan, result: StepResult | None) -> None:
        self._busy = False
        self.touched = True
        if self._rng.random() < self.fabric.profile.failing_steps and self.world.now < self.world.faulty_until:
            self._abandon(plan)
            return
        self.process.log("", f"step {plan.number}: {plan.tokens} tokens, {len(plan.rows)} rows, {plan.copies}")
        self._route(self.core.commit(plan, result or self.runner.step(plan), self.process.now))
        if plan.copies:
            self.world.count("forks", len(plan.copies))
        self._publish()
        self._wake()

    def _abandon(self, plan: StepPlan) -> None:
        """The step fails, after it wrote some of what it was to write."""
        self.world.count("steps_failed")
        self.process.log("", f"step {plan.number} fails")
        self.memory.spoil(plan, self._rng)
        self._route(self.core.abandon(plan, "the step failed"))
        self._publish()
        self._wake()

    def _step_seconds(self, plan: StepPlan) -> float:
        seconds = self.fabric.profile.slowness * (0.002 + 0.0005 * plan.tokens + 0.004 * self._rng.random())
        if self.world.now < self.slow_until:
            seconds += 1.2 * self._rng.random()
        return seconds

    def _check_plan(self, plan: StepPlan) -> None:
        pool = self.core._kv.pool
        check_writes(plan, BLOCK_SIZE, pool.reference_counts(), pool.quarantined_ids())
        salts = {
            sequence.number: leg.submit.extras.tenant_salt
            for leg in self.core._legs.values()
            for sequence in leg.sequences
        }
        check_tenants(plan, self.memory, salts)

    def _checked(self, event: Any) -> Any:
        """The core never sees a handle that is not genuine, of this prompt and of this layout."""
        if not isinstance(event, Submit) or event.handle is None:
            return event
        fault = handle_fault(
            event,
            event.handle,
            kv_key=KEYS.kv or b"",
            incarnation=self.incarnation,
            compat_hash=self.compat_hash,
            layout=layout(),
            backends=frozenset({"tcp"}),
        )
        if fault is None:
            return event
        self.world.count(f"handle_{fault.reason.value}")
        if fault.reason is RecomputeReason.HANDLE:  # nobody forges a handle of ours into another shape
            raise Violation("false_handle", f"{self.name}: {fault.detail}", event.key.internal_id)
        self.process.log(event.key.internal_id, f"handle is not used: {fault.reason.value}")
        return msgspec.structs.replace(event, handle=None, recompute=fault.reason.value)

    def _route(self, effects: list[EngineEffect]) -> None:
        outputs: list[EngineOutput] = []
        for effect in effects:
            match effect:
                case GrantLease():
                    self._handles[effect.key] = self.owner.grant(effect)
                    self.leases[effect.key] = effect.lease_id
                    self.process.log(effect.key.internal_id, f"grants lease {effect.lease_id} on {effect.blocks[0]}")
                case PrefilledOut() | HandedOver():
                    outputs.append(msgspec.structs.replace(effect, handle=self._handles.pop(effect.key, None)))
                case HoldLease() | StartPull() | DropLease():
                    self._reached(effect)
                    self.process.log(effect.key.internal_id, _told(effect))
                    self.reader.command(effect)
                case _:
                    outputs.append(effect)
        if outputs:
            self.process.soon(_HOP_S, self.server.on_outputs, outputs)

    def _reached(self, effect: HoldLease | StartPull | DropLease) -> None:
        stages = {HoldLease: "decode_queue", StartPull: "transfer"}
        if type(effect) in stages:
            self.fabric.reached(effect.key.internal_id, stages[type(effect)])

    # ---- what the transfer asks

    def pull_of(self, blocks: tuple[int, ...]) -> LegKey | None:
        wanted = sorted(blocks)
        return next((key for key, own in self.core._kv.pulls.items() if sorted(own) == wanted), None)

    def reads_moved(self) -> None:
        if not self._round_due:
            self._round_due = True
            self.process.soon(_HOP_S, self._reader_round)

    def _reader_round(self) -> None:
        self._round_due = False
        self.reader.round()

    def tenant_of(self, key: LegKey) -> bytes | None:
        leg = self.core._legs.get(key)
        return None if leg is None else leg.submit.extras.tenant_salt

    def on_control(self, message: ControlRequest, reader: str, generation: int) -> None:
        self.owner.on_request(message, reader, generation)

    def on_control_reply(self, reply: ControlReply, generation: int) -> None:
        if generation == self.process.generation:  # the connection that it came by died with its process
            self.reader.on_reply(reply)

    def on_message(self, stream: Stream, message: ReadRequest) -> None:
        self.owner.on_message(stream, message)

    def on_close(self, stream: Stream) -> None:
        self.fabric.forget(stream)

    def on_cut(self, stream: Stream) -> None:
        self.fabric.forget(stream)

    # ---- signs of life and state

    def _beat(self) -> None:
        if not self._busy:
            self._turn()  # an idle loop turns as well
        self.server.alive(self._ticks)
        self._publish()
        self.process.soon(self.limits.alive_interval_s / self.process.clock.rate, self._beat)

    def _publish(self) -> None:
        for message in self._numbers.messages(self.core.drain_kv_events(), self.core.load(), self.process.now):
            for router in self.fabric.routers.values():
                self.fabric.message("state", self.name, router.process, router.on_state, "", self.name, message)

    def snapshot(self) -> Snapshot:
        self._publish()
        return self._numbers.snapshot(self.core.snapshot_hashes(), self.core.load())

    # ---- faults that only a pod can have

    def reset_cache(self) -> None:
        if not self._busy:
            self.core.reset_prefix_cache()
            self.touched = True

    def squeeze(self, seconds: float) -> None:
        """Take all blocks that could be given, as the leases of unheard-of readers do, for so long."""
        if self._busy:
            self.process.soon(0.001, self.squeeze, seconds)  # its step is under way
            return
        kv = self.core._kv
        count = kv.pool.available
        if not count:
            return
        self._squeezes += 1
        blocks = tuple(kv.pool.allocate(count))
        kv.hand_over(blocks, -self._squeezes)
        kv.pool.release(blocks)
        self.touched = True
        self.world.count("blocks_squeezed", count)
        self.process.log("", f"{count} blocks are taken")
        self.process.soon(seconds, self.post, LeaseEnded(lease_id=-self._squeezes, why="expired"))

    @property
    def rests(self) -> bool:
        """Nothing is left of any request."""
        load = self.core.load()
        return (
            self.core.idle()
            and not self._inbox
            and load.free_blocks == load.total_blocks
            and not self.reader.pulls
            and not self.owner.table.live()
            and not self.server.legs
            and not self.server.attached
        )

    def traces_of(self, request: str) -> list[str]:
        """What is still here of a request."""
        leases = [lease for key, lease in self.leases.items() if key.internal_id == request]
        found = [f"lease {lease}" for lease in leases if lease in self.owner.table._live]
        for what, keys in (
            ("leg", self.server.legs),
            ("engine's leg", self.core._legs),
            ("quarantine", self.core._kv.pulls),
            ("pull", self.reader.pulls),
        ):
            found += [f"{what} {key.attempt}" for key in keys if key.internal_id == request]
        return found

    def leftovers(self) -> str:
        return (
            f"{self.name}: {self.core!r}; {self.owner.table!r}; pulls {[p.flow for p in self.reader.pulls.values()]}; "
            f"legs {list(self.server.legs)}; inbox {len(self._inbox)}"
        )


def _told(effect: HoldLease | StartPull | DropLease) -> str:
    match effect:
        case HoldLease():
            return f"holds lease {effect.handle.lease_id} of {effect.handle.host}"
        case StartPull():
            return f"pulls lease {effect.handle.lease_id} into {effect.blocks[0]}"
        case DropLease():
            return f"drops its lease: {effect.reason}"
