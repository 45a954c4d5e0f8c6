"""What must hold after each event of a process, and what must hold when everything is over."""

from typing import TYPE_CHECKING

from kvferry_runtime.core.integrity import IntegrityError
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.fabric import Fabric
    from tests.simulation.pod import Pod
    from tests.simulation.router_shell import Router


def check_pod(pod: "Pod") -> None:
    """The books of engine and leases, and that no block serves two masters."""
    try:
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


def check_forgotten(request: str, fabric: "Fabric") -> None:
    """A while after it has ended or its client has left, no pod has anything of a request."""
    if request in fabric.forged:
        return  # its own lease was given up to nobody, and ends by its time
    for pod in fabric.pods.values():
        left = pod.traces_of(request)
        if left:
            raise Violation("not_forgotten", f"{pod.name} still has {left}", request)


def check_router(router: "Router") -> None:
    """Counts add up, and what a flow has recorded is the beginning of the right answer."""
    admission, limits = router.admission, router.limits
    if admission.running > limits.inflight or admission.waiting > limits.queue:
        raise Violation("queue_cap", f"router: {admission.running} run, {admission.waiting} wait")
    served, router.touched = router.touched, None
    if served is None or served.flow is None:
        return
    router.bookings.check_integrity()
    name = served.request.name
    if len(served.records) > 1:
        raise Violation("two_outcomes", f"{[record.outcome for record in served.records]}", name)
    if served.records and served.flow.booked():
        raise Violation("booking", f"{served.flow.booked()} is booked after the end", name)
    answers = router.fabric.answers[name]
    for choice, (state, answer) in enumerate(zip(served.flow.choices(), answers, strict=True)):
        if state.emitted != answer.ids[: len(state.emitted)]:
            raise Violation("wrong_token", f"choice {choice}: {state.emitted} recorded, right is {answer.ids}", name)
    if served.records and router.pauses == 0:
        late = served.records[0].ended_at - served.records[0].accepted_at - served.request.deadline_s
        if late > 0.01:
            raise Violation("late", f"ended {late:.3f} s after its deadline", name)
