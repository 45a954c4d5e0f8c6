"""What pods used: CPU time from the kernel, counters from their metrics."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import psutil

from kvferry_cli.bench.records import PodUse
from kvferry_cli.local.identity import ProcessId

PREFIX = "kvferry:"

Metrics = Mapping[str, float]  # summed over labels, without the prefix


def parse_metrics(text: str) -> dict[str, float]:
    """Our metrics in the Prometheus text format, summed over their labels. What is no number is left out."""
    found: dict[str, float] = {}
    for series, value in _series(text):
        name = series.partition("{")[0]
        found[name] = found.get(name, 0.0) + value
    return found


def pods_in_use(text: str) -> int:
    """How many engine pods a router gives requests to, by its metrics."""
    return int(sum(value for series, value in _series(text) if re.match(r'router_pods\{.*state="ready"', series)))


def _series(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if line.startswith(PREFIX):
            series, _, value = line.removeprefix(PREFIX).rpartition(" ")
            try:
                yield series, float(value)
            except ValueError:
                continue  # no sample: a line cut short, or of another make


class CpuTimes(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds since some beginning."""

    pods: dict[str, float]
    client: float
    machine: float


def cpu_times(pods: Mapping[str, ProcessId | None], cores: Iterable[int]) -> CpuTimes:
    """The CPU time of each pod's process tree, of this process, and of all work on the cores."""
    each = psutil.cpu_times(percpu=True)
    return CpuTimes(
        pods={name: _tree(identity) for name, identity in pods.items()},
        client=sum(os.times()[:2]),
        machine=sum(_busy(each[core]) for core in cores if core < len(each)),
    )


def _tree(identity: ProcessId | None) -> float:
    root = identity.process() if identity is not None else None
    if root is None:
        return 0.0
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it has ended since it was listed
        total += times.user + times.system
    return total


def _busy(times: object) -> float:
    """Time of one core in which it did something, or was taken away by the host."""
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in names))


def use_of(
    name: str,
    *,
    role: str,
    cores: tuple[int, ...],
    threads: int,
    cpu_s: float,
    before: Metrics,
    after: Metrics,
) -> PodUse:
    """What a pod did between two readings of its metrics."""

    def grown(counter: str) -> float:
        return after.get(counter, 0.0) - before.get(counter, 0.0)

    return PodUse(
        name=name,
        role=role,
        cores=cores,
        threads=threads,
        cpu_s=cpu_s,
        pulls=int(grown("kv_pulls_ok_total")),
        pull_s=grown("kv_pull_seconds_total"),
        pull_bytes=int(grown("kv_pulled_bytes_total")),
        pulls_failed=int(grown("kv_pulls_failed_total")),
        recomputed=int(grown("kv_recomputed_total")),
        preemptions=int(grown("num_preemptions_total")),
    )
