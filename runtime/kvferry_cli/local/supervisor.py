"""Decides what happens to the pods of a local service: start, restart, stop. Pure: events and the time in, effects out.

Pods start in order: engines at once, the router when a decode pod has been ready. They stop in order: router, decode,
prefill; each tier is asked with SIGTERM, and killed when its grace is over. A pod that exits on its own is started
again after a back-off that doubles up to a cap and starts over once the pod has been ready for a while.
"""

import enum
from collections.abc import Sequence
from typing import Literal

import msgspec


class PodState(enum.Enum):
    """The life of one pod, over all its processes."""

    WAITING = "waiting"  # its turn to start has not come
    STARTING = "starting"  # a process runs that has not been ready yet
    READY = "ready"
    UNREADY = "unready"  # was ready, and is not
    BACKOFF = "backoff"  # exited; a new process starts when the delay is over
    STOPPING = "stopping"  # asked to stop
    STOPPED = "stopped"


class Trigger(enum.Enum):
    START = "start"
    PROBE_OK = "probe ok"
    PROBE_BAD = "probe bad"
    EXITED = "exited"
    STOP = "stop"


_S, _T = PodState, Trigger
TRANSITIONS: dict[tuple[PodState, Trigger], PodState] = {
    (_S.WAITING, _T.START): _S.STARTING,
    (_S.WAITING, _T.STOP): _S.STOPPED,
    (_S.STARTING, _T.PROBE_OK): _S.READY,
    (_S.STARTING, _T.PROBE_BAD): _S.STARTING,
    (_S.STARTING, _T.EXITED): _S.BACKOFF,
    (_S.STARTING, _T.STOP): _S.STOPPING,
    (_S.READY, _T.PROBE_OK): _S.READY,
    (_S.READY, _T.PROBE_BAD): _S.UNREADY,
    (_S.READY, _T.EXITED): _S.BACKOFF,
    (_S.READY, _T.STOP): _S.STOPPING,
    (_S.UNREADY, _T.PROBE_OK): _S.READY,
    (_S.UNREADY, _T.PROBE_BAD): _S.UNREADY,
    (_S.UNREADY, _T.EXITED): _S.BACKOFF,
    (_S.UNREADY, _T.STOP): _S.STOPPING,
    (_S.BACKOFF, _T.START): _S.STARTING,
    (_S.BACKOFF, _T.STOP): _S.STOPPED,
    (_S.STOPPING, _T.PROBE_OK): _S.STOPPING,
    (_S.STOPPING, _T.PROBE_BAD): _S.STOPPING,
    (_S.STOPPING, _T.EXITED): _S.STOPPED,
}

RUNNING = frozenset({_S.STARTING, _S.READY, _S.UNREADY, _S.STOPPING})
STOP_ORDER = ("router", "decode", "prefill")

ServiceState = Literal["starting", "ready", "degraded", "stopping", "stopped"]


class IllegalTransitionError(RuntimeError):
    """An event that the pod's state does not allow: the shell is at fault. Nothing was changed."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds; probes are counted as they complete, each with a deadline of its own.

    Silence is judged by completed probes in a row, never by the clock alone: a launcher that was paused has heard
    nothing for as long, and that says nothing of its pods.
    """

    backoff_first_s: float = 0.5
    backoff_cap_s: float = 30.0
    stable_s: float = 30.0  # ready for this long: the next exit is a first one again
    start_s: float = 900.0  # a process that was not ready by then is killed and started again
    late_probes: int = 3  # probes that say "not ready" after `start_s` before the process is killed
    silent_probes: int = 2  # a ready pod counts as unready when so many probes in a row had no answer
    hung_s: float = 30.0  # a process that was ready and answers nothing is killed when its silence is that long,
    hung_probes: int = 8  # and so many probes in a row had no answer
    grace_s: float = 15.0  # of one tier, from SIGTERM to SIGKILL
    # Exits of one pod that was never ready, before the service gives up; what is hopeless is given up at once.
    give_up_after: int | None = None


class PodSeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor knows of a pod beforehand."""

    name: str
    role: Literal["prefill", "decode", "router"]


# ---- effects -------------------------------------------------------------------------------------------------------


class Spawn(msgspec.Struct, frozen=True):
    """Start the pod's process number ``attempt`` (from 1)."""

    name: str
    attempt: int


class Terminate(msgspec.Struct, frozen=True):
    """Ask the pod's process to stop (SIGTERM)."""

    name: str


class Kill(msgspec.Struct, frozen=True):
    """Kill the pod's whole process group (SIGKILL)."""

    name: str
    reason: str


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """The pod is in another state. ``retry_s``: with BACKOFF, the delay until its next process; 0 with ``GaveUp``."""

    name: str
    before: PodState
    state: PodState
    reason: str
    retry_s: float = 0.0


class GaveUp(msgspec.Struct, frozen=True):
    """The pod exited without having been ready, too often or beyond hope; stopping is the shell's decision."""

    name: str
    reason: str


class AllReady(msgspec.Struct, frozen=True):
    """Every pod is ready, for the first time or again."""


class AllStopped(msgspec.Struct, frozen=True):
    """No process is left."""


Effect = Spawn | Terminate | Kill | Changed | GaveUp | AllReady | AllStopped


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as `ps` shows it."""

    name: str
    role: str
    state: PodState
    attempt: int  # number of processes started so far
    reason: str


class _Pod:
    def __init__(self, seat: PodSeat) -> None:
        self.seat = seat
        self.state = PodState.WAITING
        self.attempt = 0
        self.failures = 0  # exits in a row without a stable time between them
        self.ever_ready = False
        self.since = 0.0  # of the state
        self.late = 0  # probes that said "not ready" after the time to start was over
        self.silent = 0  # probes without an answer in a row
        self.silent_since = 0.0  # when the first of them completed
        self.wake: float | None = None
        self.reason = ""
        self.kill_reason = ""  # why the supervisor killed its process


class Supervisor:
    """The decision core of the launcher."""

    def __init__(self, seats: Sequence[PodSeat], policy: Policy) -> None:
        self._pods = {seat.name: _Pod(seat) for seat in seats}
        self._policy = policy
        self._stopping = False
        self._reported_ready = False
        self._tier: str | None = None  # the role that is being stopped now
        self._tier_deadline: float | None = None

    # ---- events ----

    def start(self, now: float) -> list[Effect]:
        """Begin: engines start, the router waits for a decode pod."""
        effects: list[Effect] = []
        for pod in self._pods.values():
            if pod.seat.role != "router":
                effects += self._begin(pod, now)
        return effects + self._settle(now)

    def probed(self, name: str, attempt: int, *, ready: bool, live: bool, reason: str, now: float) -> list[Effect]:
        """A probe's outcome. One of an earlier process, or of a pod without one, says nothing.

        Args:
            ready: the readiness probe was answered with 200.
            live: any answer came at all.
            reason: why it is not ready.
        """
        pod = self._pods[name]
        if attempt != pod.attempt or pod.state not in RUNNING:
            return []
        if live:
            pod.silent = 0
        else:
            pod.silent += 1
            pod.silent_since = now if pod.silent == 1 else pod.silent_since
            if pod.state is PodState.READY and pod.silent < self._policy.silent_probes:
                return []  # one lost probe on a busy machine is no news
        effects = self._move(pod, Trigger.PROBE_OK if ready else Trigger.PROBE_BAD, "" if ready else reason, now)
        if pod.state is PodState.READY:
            pod.ever_ready = True
        elif overdue := self._overdue(pod, now):
            pod.kill_reason = overdue
            effects.append(Kill(pod.seat.name, overdue))
        return effects + self._settle(now)

    def exited(self, name: str, attempt: int, why: str, now: float, *, hopeless: bool = False) -> list[Effect]:
        """The pod's process ended, or could not be started.

        Args:
            why: how it ended, such as ``exit status 1`` or ``killed by SIGKILL``.
            hopeless: its arguments or files are at fault, so that another try would end alike.
        """
        pod = self._pods[name]
        if attempt != pod.attempt or pod.state not in RUNNING:
            raise IllegalTransitionError(f"{name}: process {attempt} exited in state {pod.state.value}")
        if pod.kill_reason:
            why, pod.kill_reason = f"{pod.kill_reason}; {why}", ""
        stable = pod.state is PodState.READY and now - pod.since >= self._policy.stable_s
        pod.failures = 1 if stable else pod.failures + 1
        limit = self._policy.give_up_after
        too_often = limit is not None and pod.failures >= limit
        gives_up = not pod.ever_ready and not self._stopping and (hopeless or too_often)
        delay = backoff(pod.failures, self._policy)
        effects = self._move(pod, Trigger.EXITED, why, now, 0.0 if gives_up else delay)
        if pod.state is PodState.BACKOFF and self._stopping:
            effects += self._move(pod, Trigger.STOP, why, now)
        elif pod.state is PodState.BACKOFF:
            pod.wake = now + delay
            if gives_up:
                effects.append(GaveUp(name, why))
        return effects + self._settle(now)

    def stop(self, now: float) -> list[Effect]:
        """Stop everything in order. A second call changes nothing."""
        if self._stopping:
            return []
        self._stopping = True
        effects: list[Effect] = []
        for pod in self._pods.values():
            if pod.state in (PodState.WAITING, PodState.BACKOFF):
                effects += self._move(pod, Trigger.STOP, "", now)
                pod.wake = None
        return effects + self._settle(now)

    def kill(self, now: float) -> list[Effect]:
        """Stop everything at once."""
        effects = self.stop(now)
        for pod in self._pods.values():
            if pod.state in RUNNING:
                if pod.state is not PodState.STOPPING:
                    effects += self._move(pod, Trigger.STOP, "", now)
                effects.append(Kill(pod.seat.name, "stopped at once"))
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Do what is due."""
        effects: list[Effect] = []
        for pod in self._pods.values():
            if pod.state is PodState.BACKOFF and pod.wake is not None and pod.wake <= now:
                effects += self._begin(pod, now)
        if self._tier_deadline is not None and self._tier_deadline <= now:
            self._tier_deadline = now + self._policy.grace_s  # and again, should one survive this
            effects += [
                Kill(pod.seat.name, f"did not stop within {self._policy.grace_s:g} s")
                for pod in self._pods.values()
                if pod.state is PodState.STOPPING
            ]
        return effects + self._settle(now)

    # ---- questions ----

    def next_wake(self) -> float | None:
        """When ``tick`` has something to do if no event comes before; ``None`` for never."""
        times = [pod.wake for pod in self._pods.values() if pod.wake is not None]
        if self._tier_deadline is not None:
            times.append(self._tier_deadline)
        return min(times, default=None)

    def view(self) -> tuple[PodView, ...]:
        """All pods, in order."""
        return tuple(
            PodView(
                name=pod.seat.name,
                role=pod.seat.role,
                state=pod.state,
                attempt=pod.attempt,
                reason=pod.reason,
            )
            for pod in self._pods.values()
        )

    def service_state(self) -> ServiceState:
        """The service in one word."""
        states = {pod.state for pod in self._pods.values()}
        if states == {PodState.STOPPED}:
            return "stopped"
        if self._stopping:
            return "stopping"
        if states == {PodState.READY}:
            return "ready"
        return "degraded" if all(pod.ever_ready for pod in self._pods.values()) else "starting"

    # ---- inside ----

    def _begin(self, pod: _Pod, now: float) -> list[Effect]:
        pod.attempt += 1
        pod.wake = None
        pod.late = pod.silent = 0
        effects = self._move(pod, Trigger.START, "", now)
        return [*effects, Spawn(pod.seat.name, pod.attempt)]

    def _move(self, pod: _Pod, trigger: Trigger, reason: str, now: float, retry_s: float = 0.0) -> list[Effect]:
        before = pod.state
        after = TRANSITIONS.get((before, trigger))
        if after is None:
            raise IllegalTransitionError(f"{pod.seat.name}: {trigger.value} in state {before.value}")
        if reason or after is not PodState.STARTING:  # what ended the last process stays to be seen while it starts
            pod.reason = reason
        if after is before:
            return []
        pod.state, pod.since = after, now
        shown_delay = retry_s if after is PodState.BACKOFF else 0.0
        return [Changed(name=pod.seat.name, before=before, state=after, reason=reason, retry_s=shown_delay)]

    def _overdue(self, pod: _Pod, now: float) -> str:
        """Why the process must be killed after a probe that was not answered with "ready"; empty while it need not."""
        if pod.kill_reason or self._stopping:
            return ""
        policy = self._policy
        if pod.state is PodState.STARTING and now - pod.since >= policy.start_s:
            pod.late += 1
            return f"not ready within {policy.start_s:g} s" if pod.late >= policy.late_probes else ""
        hung = pod.silent >= policy.hung_probes and now - pod.silent_since >= policy.hung_s
        if pod.state is PodState.UNREADY and hung:
            return f"answered no probe for {now - pod.silent_since:.0f} s"
        return ""

    def _settle(self, now: float) -> list[Effect]:
        """What follows from the pods' states: the router's turn, the next tier's turn, the service's own events."""
        if self._stopping:
            return self._settle_stop(now)
        effects: list[Effect] = []
        if any(pod.ever_ready for pod in self._pods.values() if pod.seat.role == "decode"):
            for pod in self._pods.values():
                if pod.state is PodState.WAITING:
                    effects += self._begin(pod, now)
        all_ready = all(pod.state is PodState.READY for pod in self._pods.values())
        if all_ready and not self._reported_ready:
            effects.append(AllReady())
        self._reported_ready = all_ready
        return effects

    def _settle_stop(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for role in STOP_ORDER:
            tier = [pod for pod in self._pods.values() if pod.seat.role == role and pod.state in RUNNING]
            if not tier:
                continue
            if role != self._tier:
                self._tier, self._tier_deadline = role, now + self._policy.grace_s
                for pod in tier:
                    if pod.state is not PodState.STOPPING:
                        effects += self._move(pod, Trigger.STOP, "", now)
                        effects.append(Terminate(pod.seat.name))
            return effects
        if self._tier != "none":
            self._tier, self._tier_deadline = "none", None
            effects.append(AllStopped())
        return effects


def backoff(failures: int, policy: Policy) -> float:
    """Seconds until the next process after this many exits in a row (from 1)."""
    return min(policy.backoff_cap_s, policy.backoff_first_s * 2.0 ** min(failures - 1, 32))
