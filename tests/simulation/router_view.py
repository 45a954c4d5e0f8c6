"""What the simulated router knows of the pods: the real pool, fed by probes, descriptions and state streams."""

import random
from typing import TYPE_CHECKING

from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.discovery.pod_table import PodRecord, Probe
from kvferry_router.index.feed import FeedEffect
from kvferry_router.pool import Hashes, PodPool
from kvferry_router.select.policy import Policy
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import chain_hashes
from kvferry_wire.limits import Limits
from kvferry_wire.pod import PodInfo, PodPorts
from kvferry_wire.state import Snapshot, StateMessage
from tests.simulation.fabric import KEYS, Fabric, layout
from tests.simulation.scenario import BLOCK_SIZE, Request
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.pod import Pod

MODEL = "toy"
_PROBE_S = 0.3
_PORTS = PodPorts(http=1, control=5600, data=5601, state=5557)


class PodView:
    """One life of the router's knowledge."""

    def __init__(
        self, process: Process, fabric: Fabric, limits: Limits, policy: Policy, rng: random.Random, *, must_ferry: bool
    ) -> None:
        self._process = process
        self._fabric = fabric
        self._limits = limits
        self.pool = PodPool(limits=limits, policy=policy, model=MODEL, rng=rng, must_ferry=must_ferry)
        self.pool.table.replace(tuple([_endpoint(pod) for pod in fabric.pods.values()]))
        for record in self.pool.table:
            record.feed.start(process.now)
            self._probe(record)
        process.soon(_PROBE_S, self._tick)

    def hashes(self, request: Request) -> Hashes:
        extras = KeyExtras(tenant_salt=request.salt)
        return {BLOCK_SIZE: chain_hashes(KEYS.hash, request.prompt, BLOCK_SIZE, extras)}

    def suspect(self, pod: str, reason: str) -> None:
        """A leg found it dead or stalled: it is out until it answers again, and asked soon."""
        record = self.pool.table.get(pod)
        assert record is not None
        record.suspected(reason)
        self._process.soon(0.01, self._probe, record)

    # ---- probes and descriptions

    def _tick(self) -> None:
        for record in self.pool.table:
            self._apply(record.name, record.feed.tick(self._process.now))
            self._probe(record)
        self._process.soon(_PROBE_S, self._tick)

    def _probe(self, record: PodRecord) -> None:
        pod = self._fabric.pods[record.name]
        record.probed(self._answer(pod))
        if record.answers and (record.info_due or record.info is None or record.info.incarnation != _life(pod)):
            renamed = record.informed(_info(pod, self._limits))
            heard = record.feed.incarnation
            if renamed and heard is not None and heard != pod.incarnation:
                self._apply(record.name, record.feed.restart(self._process.now))

    def _answer(self, pod: "Pod") -> Probe:
        if not pod.process.up:
            return Probe("refused")
        if pod.process.paused or self._fabric.parted(self._process.name, pod.name):
            return Probe("late")
        return Probe("not_ready", "draining") if pod.core.load().draining else Probe("ready")

    # ---- state streams

    def on_state(self, pod: str, message: StateMessage) -> None:
        self._apply(pod, self._record(pod).feed.message(message, self._process.now))

    def _apply(self, pod: str, effects: list[FeedEffect]) -> None:
        for fetch in self.pool.apply(pod, effects):
            process = self._fabric.pods[pod].process
            self._fabric.message("state", self._process.name, process, self._asked_for_snapshot, "", pod, fetch.number)
            self._process.soon(1.0, self._snapshot_late, pod, fetch.number)

    def _asked_for_snapshot(self, pod: str, number: int) -> None:
        snapshot = self._fabric.pods[pod].snapshot()
        self._fabric.message("state", pod, self._process, self._on_snapshot, "", pod, number, snapshot)

    def _on_snapshot(self, pod: str, number: int, snapshot: Snapshot) -> None:
        self._apply(pod, self._record(pod).feed.snapshot(number, snapshot, self._process.now))

    def _snapshot_late(self, pod: str, number: int) -> None:
        self._apply(pod, self._record(pod).feed.snapshot_failed(number, self._process.now))

    def _record(self, pod: str) -> PodRecord:
        record = self.pool.table.get(pod)
        assert record is not None
        return record

    def lags(self) -> str:
        """Where the index differs from what pods have; empty when it does not."""
        index = self.pool.index
        index.check_integrity()
        for name, pod in self._fabric.pods.items():
            held, feed = index._held.get(name, set()), self._record(name).feed
            if feed.incarnation != pod.incarnation or held != set(pod.core.snapshot_hashes()):
                return f"{name}: {feed!r} gave {len(held)} of {len(pod.core.snapshot_hashes())} blocks"
        return ""


def _endpoint(pod: "Pod") -> Endpoint:
    return Endpoint(name=pod.name, role=pod.setup.role, host=pod.name, http=1, state=5557)


def _life(pod: "Pod") -> str:
    return pod.incarnation.hex()


def _info(pod: "Pod", limits: Limits) -> PodInfo:
    setup = pod.setup
    return PodInfo(
        version="0",
        protocol_version=PROTOCOL_VERSION,
        incarnation=_life(pod),
        epoch=1,
        role=setup.role,
        model=MODEL,
        model_digest=setup.model,
        text_digest="text",
        compat_hash=pod.compat_hash,
        dtype="int64",
        threads=1,
        block_size=BLOCK_SIZE,
        total_blocks=setup.blocks,
        max_model_len=pod.config.max_model_len,
        max_running=setup.max_running,
        token_budget=setup.token_budget,
        layout=layout(),
        ports=_PORTS,
        transfer_backends={"tcp": "ok"},
        attention_backends={},
        draining=pod.core.load().draining,
        limits=limits,
    )
