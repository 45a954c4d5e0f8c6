"""Who can be reached by what name, and over which links; and what all processes of the service have in common."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry_wire.control import ControlReply, ControlRequest
from kvferry_wire.handle import KVHandle
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.layout import BLOCK_ORDER, KVGroup, LayoutDescriptor
from kvferry_wire.leg import Leg
from kvferry_wire.limits import Limits
from tests.simulation.answers import Answer
from tests.simulation.links import GOOD, LinkFaults, Messages, Stream, StreamEnd, Wire
from tests.simulation.scenario import BLOCK_SIZE, Profile
from tests.simulation.world import Process, Violation, World

if TYPE_CHECKING:
    from tests.simulation.client import Client
    from tests.simulation.pod import Pod
    from tests.simulation.router_shell import Router

KEYS = ServiceKeys(http=bytes([1]) * 32, kv=bytes([2]) * 32, state=bytes([3]) * 32, hash=bytes([4]) * 32)
_LAYOUT = LayoutDescriptor(
    block_size=BLOCK_SIZE,
    tensor_parallel=1,
    order=BLOCK_ORDER,
    groups=(KVGroup(name="full", layers=1, kv_heads=1, head_dim=1, dtype="int64"),),
)


def layout() -> LayoutDescriptor:
    return _LAYOUT


class Fabric:
    """All links. Streams that are open are kept, so that a fault can cut them."""

    def __init__(self, world: World, profile: Profile, limits: Limits) -> None:
        self.world = world
        self.profile = profile
        self.limits = limits
        self.checksums = world.rng("checksums").choice(profile.checksums)
        self.pods: dict[str, Pod] = {}
        self.routers: dict[str, Router] = {}
        self.answers: dict[str, dict[str, tuple[Answer, ...]]] = {}  # the right ones, by request and compat hash
        self.cached: dict[str, set[int]] = {}  # cached prompt tokens that a request may be told of
        self.clients: dict[str, Client] = {}
        self.ended: dict[tuple[int, ...], int] = {}  # pods, by the prompt that ended them
        self.granted: list[KVHandle] = []  # all handles that were ever given
        self.forged: set[str] = set()  # requests with a forged handle whose answer does not tell of it
        self.streams: dict[Stream, tuple[str, str]] = {}
        self._wires: dict[tuple[str, str, str], Wire] = {}

    def wire(self, kind: str, source: str, target: str) -> Wire:
        """The link of a kind from one process to another."""
        key = (kind, source, target)
        wire = self._wires.get(key)
        if wire is None:
            faults: LinkFaults = getattr(self.profile, "control" if kind == "state" else kind, GOOD)
            wire = self._wires[key] = Wire(self.world, f"{kind}:{source}>{target}", faults)
        return wire

    def part(
        self, source: str, target: str, until: float, kinds: tuple[str, ...] = ("http", "control", "data", "state")
    ) -> None:
        """Nothing passes from one to the other before then."""
        for kind in kinds:
            self.wire(kind, source, target).closed_until = until

    def parted(self, one: str, other: str) -> bool:
        """Whether requests from one to the other, or their answers, are lost at present."""
        return self.wire("http", one, other).partitioned() or self.wire("http", other, one).partitioned()

    def stream(
        self, kind: str, request: str, ends: tuple[StreamEnd, StreamEnd], opener: Process, target: Process
    ) -> Stream:
        wires = (self.wire(kind, opener.name, target.name), self.wire(kind, target.name, opener.name))
        stream = Stream(f"{kind}:{opener.name}>{target.name}", request, opener, target, wires, ends)
        self.streams[stream] = (opener.name, target.name)
        return stream

    def forget(self, stream: Stream) -> None:
        self.streams.pop(stream, None)

    def cut_streams(self, of: str, kind: str = "", *, at_once: bool = False) -> None:
        """Cut all open streams of a process. ``at_once``: the machine goes on, and tells the other ends."""
        for stream, ends in tuple(self.streams.items()):
            if of in ends and stream.name.startswith(kind):
                stream.cut(at_once=at_once)
                self.forget(stream)

    def leg_comes(self, pod: "Pod", leg: Leg) -> None:
        """A pod takes a leg: it is of its client's tenant, and may be the pod's end."""
        request = self.clients[leg.internal_id].request
        if leg.extras.tenant_salt != request.salt:
            raise Violation("tenants", f"a leg of {request.salt!r} comes as {leg.extras.tenant_salt!r}", request.name)
        if request.poison and pod.process.up:
            self.ended[request.prompt] = self.ended.get(request.prompt, 0) + 1
            if self.ended[request.prompt] > self.limits.barren_losses:
                raise Violation("fleet", f"{self.ended[request.prompt]} pods were ended by one request", request.name)
            pod.process.soon(0.01, pod.poisoned)

    def reached(self, request: str, stage: str) -> None:
        """A request is at this stage: its client may go now."""
        client = self.clients.get(request)
        if client is not None:
            client.on_stage(stage)

    def told_cached(self, leg: Leg, cached_tokens: int) -> None:
        """A pod tells what it found of a prompt: it counts if the answer begins with this leg."""
        if not any(choice.emitted for choice in leg.choices):
            self.cached.setdefault(leg.internal_id, set()).add(cached_tokens)

    def message(
        self, kind: str, source: str, target: Process, deliver: Callable[..., None], request: str, *message: Any
    ) -> None:
        """Send one message to whoever lives at the target's address when it arrives."""
        Messages(self.wire(kind, source, target.name), target, deliver).send(request, *message)

    # ---- KV control and data

    def request(self, reader: str, owner: str, generation: int, message: ControlRequest, request: str) -> None:
        pod = self.pods.get(owner)
        if pod is not None:
            self.message("control", reader, pod.process, pod.on_control, request, message, reader, generation)

    def reply(self, owner: str, reader: str, generation: int, reply: ControlReply) -> None:
        pod = self.pods[reader]
        self.message("control", owner, pod.process, pod.on_control_reply, "", reply, generation)

    def data_stream(self, reader: str, owner: str, end: StreamEnd, request: str) -> Stream:
        source, target = self.pods[reader], self.pods[owner]
        stream = self.stream("data", request, (end, target), source.process, target.process)
        if not target.process.up:
            stream.cut(tells=(True, False))
        return stream
