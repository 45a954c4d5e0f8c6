"""The launcher: performs what the supervisor decides, on one event loop.

It starts and watches processes, probes them, writes logs and ``state.json``, and turns signals into an ordered stop.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvferry_cli.errors import UserError
from kvferry_cli.local.engine_restarts import EngineRestarts
from kvferry_cli.local.logs import LogFile, Screen
from kvferry_cli.local.pod import LocalPod
from kvferry_cli.local.ports import endpoint_of
from kvferry_cli.local.probe import probe
from kvferry_cli.local.process import PodProcess
from kvferry_cli.local.state_dir import PodRecord, ServiceRecord, StateDir
from kvferry_cli.local.supervisor import (
    AllReady,
    AllStopped,
    Changed,
    Effect,
    GaveUp,
    Kill,
    PodSeat,
    PodState,
    Policy,
    Spawn,
    Supervisor,
    Terminate,
)
from kvferry_service import exits

PROBE_TIMEOUT_S = 3.0
PROBE_STARTING_S = 0.15  # between probes of a pod that starts
PROBE_RUNNING_S = 1.0
FOLDER_CHECK_S = 1.0
SHOWN_TAIL = 10
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the service ended. ``failure`` says why it gave up; empty when it was stopped on purpose."""

    failure: str


class Launcher:
    """Runs the pods of one service until it is told to stop."""

    def __init__(
        self,
        pods: Sequence[LocalPod],
        state: StateDir,
        record: ServiceRecord,
        screen: Screen,
        policy: Policy,
        *,
        on_ready: Callable[[], None],
        move: Callable[[str], LocalPod] | None = None,
    ) -> None:
        """
        Args:
            pods: engines first, the router last.
            state: the locked state folder.
            record: the service as ``ps`` shows it; its pods and state are filled in here.
            screen: where lines are shown.
            policy: delays, and whether to give up on a pod that never gets ready.
            on_ready: called each time that all pods are ready.
            move: gives a pod that does not run other ports for those that somebody else has; none: ports stay.
        """
        self._pods = {pod.name: pod for pod in pods}
        self._state, self._record, self._screen, self._on_ready = state, record, screen, on_ready
        self._new_ports = move
        self._supervisor = Supervisor([PodSeat(name=pod.name, role=pod.role) for pod in pods], policy)
        self._processes: dict[str, PodProcess] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._logs = {pod.name: LogFile(state.logs / f"{pod.name}.log") for pod in pods}
        self._engines = {pod.name: EngineRestarts(pod.ready_file) for pod in pods}
        self._started_at: dict[str, float] = {}
        self._failure = ""
        self._crash: Exception | None = None
        self._stop_signals = 0
        self._timer: asyncio.TimerHandle | None = None
        self._folder_timer: asyncio.TimerHandle | None = None

    @property
    def record(self) -> ServiceRecord:
        """The service as it is now."""
        return self._record

    async def run(self, *, signals: bool = True) -> Outcome:
        """Run until all pods have stopped. Cancelled, it kills what still runs.

        Args:
            signals: whether SIGINT, SIGTERM and SIGHUP stop the service; else the caller answers them.
        """
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._signals = STOP_SIGNALS if signals else ()
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._perform(self._supervisor.start(self._loop.time()))
            self._check_folder()
            await self._done.wait()
        finally:
            self._end()
        if self._crash is not None:
            raise self._crash
        return Outcome(failure=self._failure)

    def stop(self) -> None:
        """Stop in order, as the first signal does; ``run`` returns when all pods have stopped."""
        self._perform(self._supervisor.stop(self._loop.time()))

    # ---- events ----

    def _on_signal(self, number: signal.Signals) -> None:
        self._stop_signals += 1
        if self._stop_signals == 1:
            self._screen.say(f"{number.name}: stopping (router, then decode, then prefill); once more kills at once")
            self._perform(self._supervisor.stop(self._loop.time()))
        elif self._stop_signals == 2:
            self._screen.say(f"{number.name}: killing what still runs")
            self._perform(self._supervisor.kill(self._loop.time()))

    def _on_exit(self, name: str, attempt: int, why: str, code: int) -> None:
        del self._processes[name]
        if (task := self._probes.pop(name, None)) is not None:
            task.cancel()
        ran = self._loop.time() - self._started_at[name]
        told = f"{why} after running {ran:.1f} s"
        if code == exits.PORT_TAKEN:
            self._move(name)
        hopeless = code == exits.UNUSABLE
        self._perform(self._supervisor.exited(name, attempt, told, self._loop.time(), hopeless=hopeless))

    def _move(self, name: str) -> None:
        """Let the pod's next process listen elsewhere, if it may."""
        if self._new_ports is None:
            return
        before = self._pods[name].ports
        try:
            moved = self._new_ports(name)
        except (UserError, OSError) as error:  # its next try meets the same ports, which may be free by then
            self._screen.say(f"{name}: a port of it is in use, and no other can be given: {error}")
            return
        self._pods[name] = moved
        for port, number in moved.ports.items():
            if number != before[port]:
                self._screen.say(f"{name}: port {before[port]} is in use by another process; {port} moves to {number}")
        if moved.role == "router":
            self._record = msgspec.structs.replace(self._record, endpoint=endpoint_of(moved.ports))

    def _on_line(self, name: str, line: str) -> None:
        try:
            self._logs[name].write(line)
        except OSError as error:  # a full disk must not stop the service
            self._screen.say(f"log of {name}: {error.strerror}")
        self._screen.line(name, line)

    async def _watch(self, name: str, attempt: int) -> None:
        pod = self._pods[name]
        while True:
            result = await probe(pod.ports["http"], pod.ready_path, PROBE_TIMEOUT_S)
            if result.ready:
                self._engines[name].look()
            self._perform(
                self._supervisor.probed(
                    name,
                    attempt,
                    ready=result.ready,
                    live=result.live,
                    reason=result.reason,
                    now=self._loop.time(),
                )
            )
            starting = self._state_of(name) is PodState.STARTING
            await asyncio.sleep(PROBE_STARTING_S if starting else PROBE_RUNNING_S)

    def _check_folder(self) -> None:
        """Stop in order when the folder, or the lock that makes it ours, is gone; restore a state file that is."""
        if not self._state.held():
            lost = f"{self._state.lock_file} was removed or replaced; the service cannot go on without it"
            self._failure = self._failure or lost
            self._screen.say(f"{lost}: stopping")
            self._perform(self._supervisor.stop(self._loop.time()))
            return
        if not self._state.state_file.exists():
            self._save(self._record)
        self._folder_timer = self._loop.call_later(FOLDER_CHECK_S, self._check_folder)

    def _on_timer(self) -> None:
        self._timer = None
        self._perform(self._supervisor.tick(self._loop.time()))

    # ---- effects ----

    def _perform(self, effects: list[Effect]) -> None:
        """Perform effects, and those that follow from them, in order."""
        try:
            work = deque(effects)
            while work:
                work.extend(self._perform_one(work.popleft()))
            self._write_state()
            self._arm_timer()
        except Exception as error:
            self._crash = error  # the loop would only log it, and the service would run on unattended
            self._done.set()
            raise

    def _perform_one(self, effect: Effect) -> list[Effect]:
        match effect:
            case Spawn(name, attempt):
                return self._spawn(name, attempt)
            case Terminate(name):
                self._processes[name].terminate()
            case Kill(name, reason):
                self._screen.say(f"{name}: killed: {reason}")
                if name in self._processes:
                    self._processes[name].kill()
            case Changed():
                self._tell(effect)
            case GaveUp(name, reason):
                self._failure = self._failure or f"{name} does not start: {reason}{self._tail_of(name)}"
                return self._supervisor.stop(self._loop.time())
            case AllReady():
                self._on_ready()
            case AllStopped():
                self._done.set()
        return []

    def _spawn(self, name: str, attempt: int) -> list[Effect]:
        pod = self._pods[name]
        self._started_at[name] = self._loop.time()
        self._logs[name].begin()

        def on_exit(why: str, code: int) -> None:
            self._on_exit(name, attempt, why, code)

        try:
            self._engines[name].begin()
            self._processes[name] = PodProcess(pod, self._state.path, lambda line: self._on_line(name, line), on_exit)
        except OSError as error:
            return self._supervisor.exited(name, attempt, f"could not be started: {error}", self._loop.time())
        self._probes[name] = self._loop.create_task(self._watch(name, attempt))
        return []

    def _tell(self, change: Changed) -> None:
        name, state = change.name, change.state
        if state is PodState.READY and change.before is PodState.UNREADY:
            self._screen.say(f"{name} is ready again")
        elif state is PodState.READY:
            self._screen.say(f"{name} is ready after {self._loop.time() - self._started_at[name]:.1f} s")
        elif state is PodState.UNREADY:
            self._screen.say(f"{name} is not ready any more: {change.reason}")
        elif state is PodState.BACKOFF:
            tail = self._tail_of(name)
            then = f"it starts again in {change.retry_s:.1f} s" if change.retry_s else "another try would end alike"
            self._screen.say(f"{name} ended: {change.reason}; {then}{tail}")
        elif state is PodState.STOPPED and change.before is PodState.STOPPING:
            self._screen.say(f"{name} stopped: {change.reason}")

    def _tail_of(self, name: str) -> str:
        lines = self._logs[name].tail(SHOWN_TAIL)
        return "".join(["; its last lines:", *(f"\n    {line}" for line in lines)]) if lines else ""

    # ---- bookkeeping ----

    def _state_of(self, name: str) -> PodState:
        return next(view.state for view in self._supervisor.view() if view.name == name)

    def _write_state(self) -> None:
        pods = tuple(
            PodRecord(
                name=view.name,
                role=view.role,
                state=view.state.value,
                process=self._processes[view.name].identity if view.name in self._processes else None,
                ports=self._pods[view.name].ports,
                restarts=max(0, view.attempt - 1) + self._engines[view.name].count,
                reason=view.reason,
            )
            for view in self._supervisor.view()
        )
        record = msgspec.structs.replace(self._record, state=self._supervisor.service_state(), pods=pods)
        if record != self._record:
            self._record = record
            self._save(record)

    def _save(self, record: ServiceRecord) -> None:
        if not self._state.held():
            return  # another launcher may write there by now
        try:
            self._state.write_state(record)
        except OSError as error:
            self._screen.say(f"{self._state.state_file}: {error.strerror}")

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self._supervisor.next_wake()
        if wake is not None and not self._done.is_set():
            self._timer = self._loop.call_at(wake, self._on_timer)

    def _end(self) -> None:
        """Leave nothing behind, also after a fault of the launcher itself."""
        for timer in (self._timer, self._folder_timer):
            if timer is not None:
                timer.cancel()
        for task in self._probes.values():
            task.cancel()
        for process in self._processes.values():
            process.kill()
        for number in self._signals:
            self._loop.remove_signal_handler(number)
        for log in self._logs.values():
            log.close()
