"""What must hold after each event of a process, and what must hold when everything is over."""

from typing import TYPE_CHECKING

from kvferry_runtime.core.integrity import IntegrityError
from kvferry_runtime.transfer.flow import RENEWING
from tests.simulation.links import GOOD
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from kvferry_router.flow_messages import Record
    from tests.simulation.fabric import Fabric
    from tests.simulation.pod import Pod
    from tests.simulation.router_shell import Router, Served

NOTICED_S = 2.2  # a cut is noticed within two seconds
STEADY_S = 2.0  # a pod that has been up for so long is known to the router, and every pause between two looks is over


def check_pod(pod: "Pod") -> None:
    """The books of engine and leases, and that no block serves two masters."""
    try:
        if pod.owner.table.granted:
            pod.owner.table.check_integrity()
        if pod.touched:
            pod.core.check_integrity()
    except IntegrityError as error:
        raise Violation("integrity", f"{pod.name}: {error}") from error
    _check_leases(pod)
    if pod.touched:
        pod.touched = False
        _check_pulls(pod)
        _check_queues(pod)


def _check_leases(pod: "Pod") -> None:
    """A live lease keeps exactly the blocks that it was granted."""
    held = pod.core._kv.leases
    for lease in pod.owner.table._live.values():
        if held.get(lease.lease_id) != lease.blocks[0]:
            kept = held.get(lease.lease_id)
            raise Violation("lease_blocks", f"{pod.name}: lease {lease.lease_id} is on {lease.blocks}, kept are {kept}")


def _check_pulls(pod: "Pod") -> None:
    """A block that a transfer writes has this writer alone, and is not in the cache."""
    kv = pod.core._kv
    writers: dict[int, object] = {}
    for key, blocks in kv.pulls.items():
        for block in blocks:
            if block in writers or block in kv.cache:
                raise Violation("two_writers", f"{pod.name}: block {block} is written by {key}", key.internal_id)
            writers[block] = key
    for leg in pod.core._legs.values():
        for sequence in leg.sequences:
            for block in sequence.table:
                if writers.get(block, leg.key) != leg.key:
                    owner = writers[block]
                    raise Violation("two_writers", f"{pod.name}: block {block} of {sequence!r} is written by {owner}")


def _check_queues(pod: "Pod") -> None:
    limits, load = pod.limits, pod.core.load()
    if load.waiting > limits.queue + pod.setup.max_running + limits.transfers:
        raise Violation("queue_cap", f"{pod.name}: {load.waiting} legs wait; the queue takes {limits.queue}")
    if load.running > pod.setup.max_running:
        raise Violation("queue_cap", f"{pod.name}: {load.running} run; {pod.setup.max_running} may")


def check_departure(pod: "Pod", until: float) -> None:
    """Where nothing else goes wrong, a pod that drains has no leg left that another pod could have taken long ago."""
    others = [
        other.name
        for other in pod.fabric.pods.values()
        if other is not pod and other.setup.role in (pod.setup.role, "both") and other.available_since < until - 4.0
    ]
    if pod.fabric.profile.kinds == ("depart",) and others and pod.server.legs:
        raise Violation("late_departure", f"{pod.name} still has {list(pod.server.legs)}; there are {others}")


_UNHURT = frozenset(
    {"reset_cache", "squeeze", "slow_steps", "drain", "depart", "cut_streams", "crash_router", "stop_router"}
)


def check_expiry(owner: str, incarnation: bytes, lease_id: int, fabric: "Fabric") -> None:
    """Where control messages arrive and nobody sleeps, no lease ends by time that a reader still renews."""
    profile = fabric.profile
    if profile.control != GOOD or not _UNHURT.issuperset(profile.kinds):
        return
    for pod in fabric.pods.values():
        for key, pull in pod.reader.pulls.items():
            named = (pull.lease.incarnation, pull.lease.lease_id) == (incarnation, lease_id)
            if named and pod.process.up and pull.flow.state in RENEWING:
                what = f"lease {lease_id} of {owner} has expired, and {pod.name} wants it: {pull.flow}"
                raise Violation("live_lease", what, key.internal_id)


def check_forgotten(request: str, fabric: "Fabric") -> None:
    """A while after it has ended or its client has left, no pod has anything of a request."""
    if request in fabric.forged:
        return  # its own lease was given up to nobody, and ends by its time
    for pod in fabric.pods.values():
        left = pod.traces_of(request)
        if left:
            raise Violation("not_forgotten", f"{pod.name} still has {left}", request)


def check_no_work(request: str, fabric: "Fabric") -> None:
    """Some time after it has ended, or its router has, no pod that can know works on a request.

    Leases may be left, until their time, and pulls, until their writer has stopped.
    """
    for pod in fabric.pods.values():
        left = [trace for trace in pod.traces_of(request) if trace.startswith(("leg", "engine"))]
        reachable = fabric.world.now - _reached_since(pod, fabric)
        if left and pod.process.up and not pod.process.paused and reachable > 2.0:
            raise Violation("not_freed", f"{pod.name} still has {left}", request)


def check_freed(request: str, fabric: "Fabric") -> None:
    """A router died a while ago: no pod works on what it served; where nothing else goes wrong, none keeps its KV."""
    check_no_work(request, fabric)
    profile = fabric.profile
    if set(profile.kinds) - {"crash_router", "stop_router"} or (profile.http, profile.control) != (GOOD, GOOD):
        return
    for pod in fabric.pods.values():
        if left := pod.traces_of(request):
            raise Violation("not_freed", f"{pod.name} still has {left} of a router that has died", request)


def check_old_legs(router: "Router") -> None:
    """No pod that can know works on a leg that the router gave up a while ago."""
    fabric = router.fabric
    if fabric.profile.http != GOOD:
        return
    for pod in fabric.pods.values():
        if not pod.process.up or pod.process.paused or fabric.world.now - _reached_since(pod, fabric) < NOTICED_S:
            continue
        for key in pod.server.legs:
            served = router.by_name.get(key.internal_id)
            since = None if served is None else served.given_up_at.get(key.attempt)
            if since is not None and fabric.world.now - since > NOTICED_S:
                raise Violation("not_freed", f"{pod.name} still works on leg {key.attempt}", key.internal_id)


def check_router(router: "Router") -> None:
    """Counts add up, and what a flow has recorded is the beginning of the right answer of its model."""
    admission, limits = router.admission, router.limits
    if admission.running > limits.inflight or admission.waiting > limits.queue:
        raise Violation("queue_cap", f"router: {admission.running} run, {admission.waiting} wait")
    served, router.touched = router.touched, None
    if served is None or served.flow is None:
        return
    router.view.pool.bookings.check_integrity()
    name = served.request.name
    if len(served.records) > 1:
        raise Violation("two_outcomes", f"{[record.outcome for record in served.records]}", name)
    if served.records and served.flow.booked():
        raise Violation("booking", f"{served.flow.booked()} is booked after the end", name)
    answers = router.fabric.answers[name][served.compat_hash]
    recorded = served.flow.choices() if served.flow._answer.given.kept else ()
    for choice, (state, answer) in enumerate(zip(recorded, answers, strict=bool(recorded))):
        if state.emitted != answer.ids[: len(state.emitted)]:
            raise Violation("wrong_token", f"choice {choice}: {state.emitted} recorded, right is {answer.ids}", name)
    if served.records:
        _check_record(router, served, served.records[0])


def _check_record(router: "Router", served: "Served", record: "Record") -> None:
    """It came in time, tells all that happened, and a request that failed could not be answered."""
    name = served.request.name
    if router.pauses == 0:
        late = record.ended_at - record.accepted_at - served.request.deadline_s
        if late > 0.01:
            raise Violation("late", f"ended {late:.3f} s after its deadline", name)
    if record.outcome == "ok" and served.request.stream and served.told != ", ".join(record.resumed):
        raise Violation("untold", f"{record.resumed} happened, the stream tells {served.told!r}", name)
    if record.outcome in ("failed", "unavailable", "invalid", "busy"):
        _check_given_up(router, served, record)


def _check_given_up(router: "Router", served: "Served", record: "Record") -> None:
    name, profile = served.request.name, router.fabric.profile
    begun = record.completion_tokens > 0
    match record.gave_up:
        case "barren":
            wrong = len(served.lost) < router.limits.barren_losses
        case "losses":
            wrong = len(served.lost) < router.limits.leg_losses
        case "memory":
            wrong = not profile.forgetful
        case "transfer":
            wrong = router.policy != "fail"
        case "no_pod":
            idle = [pod.name for pod in router.fabric.pods.values() if _could_answer(pod, router, served)]
            tried = begun or len(served.lost) < router.limits.decode_attempts
            wrong = tried and profile.http == GOOD and bool(idle) and record.outcome != "busy"
            if begun and record.outcome != "busy" and served.lost_at is not None:
                wrong |= record.ended_at - served.lost_at < router.limits.resume_wait_s - 0.01
        case _:
            wrong = True
    if wrong:
        raise Violation("given_up", f"{record.outcome}, {record.gave_up} after {served.lost}", name)


def _could_answer(pod: "Pod", router: "Router", served: "Served") -> bool:
    """Whether a pod has been there for a while, so that an answer that has begun should have gone on there."""
    fabric = router.fabric
    # A step that outlasts the stall timeout looks like the end of its engine.
    # A router that has just woken finds the waits of its requests over before it hears of its pods.
    since = max(pod.available_since, pod.slow_until, router.awake_since, _reached_since(pod, fabric))
    return (
        pod.setup.role in ("decode", "both")
        and pod.compat_hash == served.compat_hash
        and len(served.request.prompt) + served.request.sampling.max_tokens <= pod.config.max_model_len
        and fabric.world.now - since > STEADY_S
    )


def _reached_since(pod: "Pod", fabric: "Fabric") -> float:
    """When the pod and every router could speak to each other last for the first time."""
    ways = [way for router in fabric.routers for way in ((router, pod.name), (pod.name, router))]
    return max(pod.awake_since, *(fabric.wire("http", *way).closed_until for way in ways))
