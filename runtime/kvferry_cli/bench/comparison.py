"""Both sides in one go: start the services, alternate the rounds, stop everything, judge the answers."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

import msgspec

from kvferry_cli.bench.answers import Compared, Doubt, compare_answers
from kvferry_cli.bench.client import AnswerError, Client, session
from kvferry_cli.bench.cores import pin, shown
from kvferry_cli.bench.load import WARM_UP, LoadSpec, Schedule
from kvferry_cli.bench.manifests import SIDES, Side, aggregated, disaggregated
from kvferry_cli.bench.records import PodUse, Round, Trace
from kvferry_cli.bench.side import RunningSide, running, write_client_key
from kvferry_cli.bench.traffic import run_round
from kvferry_cli.bench.usage import CpuTimes, Metrics, cpu_times, use_of
from kvferry_cli.errors import ExitCode, UserError
from kvferry_operator.api import InferenceService
from kvferry_operator.plan import Observed, ServicePlan, plan
from kvferry_wire.pod import PodInfo

if TYPE_CHECKING:
    import aiohttp

# SIGINT by name: a shell starts background jobs with it ignored, and Python then raises nothing.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_WRONG_SHOWN = 5

Tell = Callable[[str], None]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured, and how."""

    manifest: Path
    service: InferenceService
    model: str  # as the engines take it
    words: tuple[tuple[int, ...], ...]  # token ids of the prompts' words
    load: LoadSpec
    cores: tuple[int, ...]  # that this process may use
    pinned: bool
    apart: bool  # each side runs for its own rounds only
    start_s: float  # of a side, until it is ready
    round_s: float
    judged: int  # most answers that the reference judges


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A side as it ran."""

    pods: dict[str, str]  # engine pod -> the cores it had, in words
    threads: dict[str, int]
    dtype: str
    token_budget: dict[str, int]
    kv_tokens: dict[str, int]  # room of each pod


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the answers. None is wrong: a wrong one is an error."""

    answers: int
    equal: int
    single: int
    differing: int  # answers that differ from the other side's
    judged: int  # found right by the reference
    unjudged: int  # differing ones beyond the limit


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run gave."""

    rounds: tuple[Round, ...]
    setups: dict[Side, Setup]
    pinning: str  # why the pods had no cores of their own; empty where they had
    answers: Judged
    load_average: tuple[float, float]  # of the machine, before and after


def measure(asked: Asked, tell: Tell) -> Measured:
    """Run the comparison.

    Args:
        tell: gets a line of progress now and then.

    Raises:
        UserError: something could not be started, did not end in time, or answered wrongly. The logs are kept then.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-"))
    before = os.getloadavg()[0]
    try:
        run = _Run(asked, folder, tell)
        asyncio.run(run.all_rounds())
        after = os.getloadavg()[0]
        with _signals_raise():
            answers = judge_answers(asked, run.rounds, next(iter(run.setups.values())).dtype, tell)
    except AnswerError as error:
        raise UserError(f"no figures: {error}; logs are in {folder}") from None
    except UserError as error:
        if error.code is ExitCode.INTERRUPTED:
            rmtree(folder, ignore_errors=True)
            raise
        raise UserError(f"{error}; logs are in {folder}", error.code) from None
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise
    rmtree(folder, ignore_errors=True)
    return Measured(
        rounds=tuple(run.rounds),
        setups=run.setups,
        pinning=run.pinning,
        answers=answers,
        load_average=(before, after),
    )


class _Run:
    """The rounds and what they need."""

    def __init__(self, asked: Asked, folder: Path, tell: Tell) -> None:
        self._asked, self._folder, self._tell = asked, folder, tell
        self._schedule = Schedule(asked.load, asked.words)
        keys_file = folder / "client.keys"
        self._key = write_client_key(keys_file)
        made = {"disaggregated": disaggregated, "aggregated": aggregated}
        observed = Observed(cores=len(asked.cores))
        self._plans: dict[Side, ServicePlan] = {
            side: plan(made[side](asked.service, str(keys_file)), observed) for side in SIDES
        }
        self._cores, self.pinning = _pinned(asked, self._plans)
        self._counters: dict[Side, dict[str, Metrics]] = {}
        self.setups: dict[Side, Setup] = {}
        self.rounds: list[Round] = []

    async def all_rounds(self) -> None:
        """Both sides are warmed up, then take turns; which begins changes from round to round."""
        with _signals_cancel_this_task():
            async with session(self._key, silence_s=self._asked.round_s) as http, contextlib.AsyncExitStack() as stack:
                sides: dict[Side, RunningSide] = {}
                for side in () if self._asked.apart else SIDES:
                    sides[side] = await stack.enter_async_context(self._warm(side, http))
                for number in range(self._asked.load.rounds):
                    for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                        if side in sides:
                            await self._measured_round(sides[side], http, number)
                            continue
                        async with self._warm(side, http) as alone:
                            await self._measured_round(alone, http, number)

    @contextlib.asynccontextmanager
    async def _warm(self, side: Side, http: "aiohttp.ClientSession") -> AsyncIterator[RunningSide]:
        """The side, ready and warmed up."""
        asked, side_plan = self._asked, self._plans[side]
        self._tell(f"{side}: starting {', '.join(pod.name for pod in side_plan.pods)}")
        async with running(
            side,
            side_plan,
            self._folder / side,
            manifest=asked.manifest,
            model=asked.model,
            cores=self._cores[side],
            start_s=asked.start_s,
        ) as service:
            await service.wait_for_all_pods(http, asked.start_s)
            infos = await service.infos(http)
            _check_room(side, infos, asked.load)
            self.setups[side] = _setup(service, infos, self._cores[side])
            self._tell(f"{side}: warming up")
            warm = Schedule(msgspec.structs.replace(asked.load, prompts=1), asked.words)
            _, _, traces = await run_round(
                Client(http, service.endpoint, service.model),
                warm,
                WARM_UP,
                limit_s=asked.round_s,
                on_begin=_nothing,
                on_end=_nothing,
            )
            _check_path(side, traces)
            self._counters[side] = await service.settled_metrics(http)
            yield service

    async def _measured_round(self, service: RunningSide, http: "aiohttp.ClientSession", number: int) -> None:
        """One round into ``rounds``. Raises ``UserError``, ``AnswerError``."""
        asked, side = self._asked, service.side
        processes = service.processes()
        edges: list[CpuTimes] = []

        async def edge() -> None:
            edges.append(cpu_times(processes, asked.cores))

        began, ended, traces = await run_round(
            Client(http, service.endpoint, service.model),
            self._schedule,
            number,
            limit_s=asked.round_s,
            on_begin=edge,
            on_end=edge,
        )
        _check_uncached(traces)
        before, self._counters[side] = self._counters[side], await service.settled_metrics(http)
        service.record()  # no pod was restarted
        first, last = edges
        used = {name: last.pods[name] - first.pods[name] for name in processes}
        self.rounds.append(
            Round(
                side=side,
                number=number,
                began=began,
                ended=ended,
                traces=traces,
                pods=self._uses(service, used, before),
                router_cpu_s=used["router"],
                client_cpu_s=last.client - first.client,
                machine_cpu_s=last.machine - first.machine,
            )
        )
        self._tell(f"{side}: round {number + 1} of {asked.load.rounds}: {ended - began:.1f} s")

    def _uses(
        self, service: RunningSide, used: Mapping[str, float], before: Mapping[str, Metrics]
    ) -> tuple[PodUse, ...]:
        return tuple(
            use_of(
                pod.name,
                role=pod.role,
                cores=pod.cores,
                threads=service.threads[pod.name],
                cpu_s=used[pod.name],
                before=before[pod.name],
                after=self._counters[service.side][pod.name],
            )
            for pod in service.engines
        )


async def _nothing() -> None:
    """An edge of a round that is not measured."""


def _pinned(asked: Asked, plans: Mapping[Side, ServicePlan]) -> tuple[dict[Side, dict[str, tuple[int, ...]]], str]:
    """The cores of each pod, by side, and why there are none."""
    if not asked.pinned:
        return {side: {} for side in plans}, "pinning was turned off"
    if not hasattr(os, "sched_setaffinity"):
        return {side: {} for side in plans}, "this system cannot pin processes to cores"
    found = {
        side: pin(asked.cores, {pod.name: pod.threads or 1 for pod in made.pods if pod.role != "router"})
        for side, made in plans.items()
    }
    reasons = [reason for _, reason in found.values() if reason]
    if reasons:  # one side on cores of its own and the other not would not be the same cores
        return {side: {} for side in plans}, reasons[0]
    return {side: cores for side, (cores, _) in found.items()}, ""


def _setup(service: RunningSide, infos: Mapping[str, PodInfo], cores: Mapping[str, tuple[int, ...]]) -> Setup:
    return Setup(
        pods={pod.name: shown(cores.get(pod.name, ())) for pod in service.engines},
        threads={name: info.threads for name, info in infos.items()},
        dtype=next(iter(infos.values())).dtype,
        token_budget={name: info.token_budget for name, info in infos.items()},
        kv_tokens={name: info.total_blocks * info.block_size for name, info in infos.items()},
    )


@contextlib.contextmanager
def _signals_cancel_this_task() -> Iterator[None]:
    """Signals end the run in order. Raises ``UserError`` when one came."""
    loop, task, got = asyncio.get_running_loop(), asyncio.current_task(), list[signal.Signals]()
    assert task is not None

    def end(number: signal.Signals) -> None:
        got.append(number)
        task.cancel()

    for number in ENDING_SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    except asyncio.CancelledError:
        if not got:
            raise
        raise UserError(f"ended by {got[0].name}", ExitCode.INTERRUPTED) from None
    finally:
        for number in ENDING_SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Signals raise ``UserError`` while no event loop answers them."""

    def end(number: int, _: object) -> None:
        raise UserError(f"ended by {signal.Signals(number).name}", ExitCode.INTERRUPTED)

    before = {number: signal.signal(number, end) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- checks --------------------------------------------------------------------------------------------------------


def _check_room(side: Side, infos: Mapping[str, PodInfo], load: LoadSpec) -> None:
    """Raises ``UserError`` for a load that a pod could never hold."""
    for name, info in infos.items():
        room = min(info.max_model_len, info.total_blocks * info.block_size)
        if load.longest > room:
            raise UserError(f"{side}: {name} holds sequences of at most {room} tokens; the load's have {load.longest}")
        if load.streams + 1 > info.max_running:
            told = f"{side}: {name} runs at most {info.max_running} sequences at once"
            raise UserError(f"{told}; accepts --streams up to {info.max_running - 1}", ExitCode.USAGE)


def _check_path(side: Side, traces: Sequence[Trace]) -> None:
    """Raises ``UserError`` where the router did not do what the side stands for."""
    for trace in traces:
        if trace.request.kind == "prompt" and trace.path != side:
            raise UserError(
                f"{side}: x-kvferry-path of a prompt of {len(trace.request.prompt_ids)} tokens was {trace.path!r}; "
                "spec.router.disaggregation decides when a prompt goes through a prefill pod"
            )


def _check_uncached(traces: Sequence[Trace]) -> None:
    """Raises ``UserError`` where a prompt was not computed."""
    for trace in traces:
        if trace.request.kind == "prompt" and trace.cached_tokens:
            raise UserError(f"{trace.request.name}: {trace.cached_tokens} of its tokens were in a prefix cache")


def judge_answers(asked: Asked, rounds: Sequence[Round], dtype: str, tell: Tell) -> Judged:
    """Compare both sides' answers, and ask the reference where they differ. Raises ``AnswerError`` for a wrong one."""
    compared = compare_answers(rounds, asked.load.seed)
    doubts = _chosen(compared, asked.judged)
    if doubts:
        from kvferry_cli.bench.reference import Reference

        tell(f"judging {len(doubts)} of {compared.answers} answers by one pass of the model")
        reference = Reference(asked.model, dtype, asked.load.longest)
        wrong = [
            f"{doubt.side}, {doubt.trace.request.name}: {why}"
            for doubt in doubts
            if (why := reference.why_wrong(doubt.trace))
        ]
        if wrong:
            more = f" and {len(wrong) - MAX_WRONG_SHOWN} more" if len(wrong) > MAX_WRONG_SHOWN else ""
            raise AnswerError(f"{len(wrong)} answers are wrong: {'; '.join(wrong[:MAX_WRONG_SHOWN])}{more}")
    differing = sum(doubt.differs for doubt in compared.doubts)
    return Judged(
        answers=compared.answers,
        equal=compared.equal,
        single=compared.single,
        differing=differing,
        judged=len(doubts),
        unjudged=differing - sum(doubt.differs for doubt in doubts),
    )


def _chosen(compared: Compared, most: int) -> list[Doubt]:
    """Those that differ first: they are more likely to be wrong."""
    return sorted(compared.doubts, key=lambda doubt: not doubt.differs)[:most]
