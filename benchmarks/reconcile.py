"""The operator on a real API server: how fast, how quiet, how large, how soon after a fault.

    python benchmarks/reconcile.py [--services 500] [--rest 60] [--rounds 3] [--json FILE]

Everything runs on this machine: etcd, kube-apiserver, the operator's process with the chart's rights. There are no
nodes, so no pod starts; what is measured ends with the objects that the operator writes.

Needs kube-apiserver, etcd and kubectl: `make test-tools`, or KUBEBUILDER_ASSETS. Prints one table:

- services applied to all objects written: from the first `kubectl apply` of so many services to the last one's status;
- calls and CPU seconds for each service;
- calls of the API per minute at rest, the Lease's and the watches' apart;
- memory (RSS) with 1 service and with all of them, after start and after the work;
- failover after SIGTERM and after kill -9, until the other operator has made a change, and what it calls in all;
- drift to repair: from a child's deletion by hand to its return, p50 and worst of all kinds.
"""

import argparse
import json
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.apiserver.conftest import install_crds  # noqa: E402 - the rig of the tests is the rig of the figures
from tests.apiserver.operator.install import Installation  # noqa: E402
from tests.apiserver.operator.process import OperatorProcess  # noqa: E402
from tests.apiserver.operator.service import Service  # noqa: E402
from tests.support.api_server import ApiServer  # noqa: E402
from tests.support.cluster_tools import Absent, find_tools  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402

SPACES = 5  # namespaces that the services are spread over
WRITERS = 8  # who apply at once
LATE_S = 900.0
REST_S = 1.5
DRIFTS = (
    ("Service", "v1", "-router"),
    ("ConfigMap", "v1", "-plan"),
    ("ServiceAccount", "v1", "-engine"),
    ("PodDisruptionBudget", "policy/v1", "-decode"),
    ("NetworkPolicy", "networking.k8s.io/v1", "-deny"),
)
SERVERS = ("kube-apiserver", "etcd")
CALLS = "kvferry:operator_api_calls_total"
WATCHES = "kvferry:operator_watch_requests_total"


class Figures:
    """What was measured, in the order of the table."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: float, unit: str, note: str = "") -> None:
        self.values[name] = value
        shown = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        self.rows.append((name, f"{shown} {unit}" + (f" ({note})" if note else "")))
        print(f"  {name}: {self.rows[-1][1]}", flush=True)


def told(service: Service) -> bool:
    """Whether the operator has written all objects and said so."""
    found = service.found()
    return found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]


def make_services(installation: Installation, count: int, prefix: str) -> list[Service]:
    spaces = installation.namespaces
    return [Service(installation.server, spaces[index % len(spaces)], f"{prefix}{index}") for index in range(count)]


def apply_all(services: Sequence[Service]) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda service: service.write(), services))


def measure_apply(figures: Figures, process: OperatorProcess, services: Sequence[Service], name: str) -> None:
    """Many services at once, until each one's status says that its objects were written."""
    before, used, begun = process.metrics(), cpu_used(process), time.monotonic()
    apply_all(services)
    applied = time.monotonic() - begun
    left = list(services)

    def done() -> bool:
        while left and told(left[-1]):
            left.pop()
        return not left

    wait_for(done, f"{len(services)} services to be told", LATE_S)
    seconds = time.monotonic() - begun
    rest(process)
    after = process.metrics()
    writes = total(after, CALLS, 'verb="P') - total(before, CALLS, 'verb="P')
    figures.add(f"{name}: applied to all objects written", seconds, "s", f"users' own writes {applied:.1f} s")
    figures.add(f"{name}: a service", 1000 * seconds / len(services), "ms")
    looks = total(after, CALLS, 'verb="GET') - total(before, CALLS, 'verb="GET')
    figures.add(
        f"{name}: writes for each service", writes / len(services), "calls", f"{looks / len(services):.3g} looks"
    )
    for who, seconds in cpu_used(process).items():
        figures.add(f"{name}: CPU of {who} for each service", 1000 * (seconds - used[who]) / len(services), "ms")


def cpu_used(process: OperatorProcess) -> dict[str, float]:
    """Seconds of CPU that the operator and the servers around it have used: what a loaded machine does not change."""
    used = {"the operator": process.cpu_s()}
    for child in psutil.Process().children():
        if child.name() in SERVERS:
            times = child.cpu_times()
            used[child.name()] = times.user + times.system
    return used


def rest(process: OperatorProcess) -> None:
    """Return when nothing was called for a second and a half but for the Lease."""
    calls, since = process.calls(), time.monotonic()

    def still() -> bool:
        nonlocal calls, since
        now = process.calls()
        if now != calls:
            calls, since = now, time.monotonic()
        return time.monotonic() - since > REST_S

    wait_for(still, "the operator to rest", LATE_S)


def total(metrics: dict[str, float], name: str, part: str = "") -> float:
    return sum(value for sample, value in metrics.items() if sample.startswith(name) and part in sample)


def measure_rest(figures: Figures, process: OperatorProcess, seconds: float, name: str) -> None:
    """Calls while nothing changes."""
    before, begun = process.metrics(), time.monotonic()
    threading.Event().wait(seconds)
    after, minutes = process.metrics(), (time.monotonic() - begun) / 60
    calls = total(after, CALLS) - total(before, CALLS)
    lease = total(after, CALLS, 'kind="Lease"') - total(before, CALLS, 'kind="Lease"')
    watches = total(after, WATCHES) - total(before, WATCHES)
    figures.add(f"{name} at rest: calls but for Lease and watches", (calls - lease) / minutes, "/min")
    figures.add(f"{name} at rest: Lease", lease / minutes, "/min")
    figures.add(f"{name} at rest: watches begun anew", watches / minutes, "/min")
    cpu = total(after, "process_cpu_seconds_total") - total(before, "process_cpu_seconds_total")
    figures.add(f"{name} at rest: CPU", 100 * cpu / (minutes * 60), "% of one core")


def measure_drift(figures: Figures, service: Service, rounds: int) -> None:
    """A child is deleted by hand, until there is another one."""
    late: list[float] = []
    for _ in range(rounds):
        for kind, api_version, suffix in DRIFTS:
            child = service.child(kind, service.name + suffix, api_version)
            assert child is not None
            uid, begun = child["metadata"]["uid"], time.monotonic()
            service.server.client.delete(child)
            while True:
                found = service.child(kind, service.name + suffix, api_version)
                if found is not None and found["metadata"]["uid"] != uid:
                    break
                if time.monotonic() - begun > 30:
                    raise SystemExit(f"{kind} was not repaired within 30 s")
            late.append(time.monotonic() - begun)
    figures.add("drift to repair, p50", 1000 * statistics.median(late), "ms", f"{len(late)} deletions")
    figures.add("drift to repair, worst", 1000 * max(late), "ms")


def measure_failover(
    figures: Figures, start: Callable[[str], OperatorProcess], first: OperatorProcess, service: Service, rounds: int
) -> OperatorProcess:
    """From the end of the one that works to the other's first change. Returns the one that works then."""
    port = 9000
    leader = first
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGKILL, "kill -9")):
        late: list[float] = []
        for _ in range(rounds):
            waiting = start(f"waiting-{port}")
            waiting.await_ready()
            port += 1
            leader.send(number)
            begun = time.monotonic()
            service.write(spec__router__port=port)
            check = lambda port=port: f":{port}/" in service.found()["status"].get("url", "")  # noqa: E731
            wait_for(check, "the other operator's change", 60.0)
            late.append(time.monotonic() - begun)
            leader.await_end(30.0)
            leader = waiting
        figures.add(
            f"failover after {name}, p50", statistics.median(late), "s", f"worst of {rounds}: {max(late):.1f} s"
        )
    return leader


def run(options: argparse.Namespace, server: ApiServer, folder: Path) -> Figures:
    figures = Figures()
    installation = Installation(server, folder, namespaces=SPACES)
    processes: list[OperatorProcess] = []

    def start(name: str) -> OperatorProcess:
        processes.append(OperatorProcess(installation, name))
        return processes[-1]

    try:
        begun = time.monotonic()
        process = start("first")
        process.await_leading()
        figures.add("start to leading", time.monotonic() - begun, "s")
        one = make_services(installation, 1, "one")
        measure_apply(figures, process, one, "1 service")
        figures.add("RSS with 1 service", process.rss_mib(), "MiB")
        measure_rest(figures, process, options.rest, "1 service")
        measure_drift(figures, one[0], options.rounds)
        many = make_services(installation, options.services, "many")
        measure_apply(figures, process, many, f"{options.services} services")
        figures.add(f"RSS with {options.services} services, after the work", process.rss_mib(), "MiB")
        measure_rest(figures, process, options.rest, f"{options.services} services")
        measure_drift(figures, many[-1], options.rounds)
        leader = measure_failover(figures, start, process, one[0], options.rounds)
        rest(leader)
        figures.add("a new leader's calls but for its Lease", leader.calls(), "calls", f"{options.services} services")
        figures.add(f"RSS with {options.services} services, after a start", leader.rss_mib(), "MiB")
    finally:
        for process in processes:
            process.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=500, help="services of the large case")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds of rest that are watched")
    parser.add_argument("--rounds", type=int, default=3, help="repeats of drift and failover")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    try:
        tools = find_tools("apiserver")
    except Absent as absent:
        print(f"skipped: {absent}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="kvferry-operator-"))
    server = ApiServer(tools, folder)
    print(f"{platform.machine()}, {platform.python_version()}, {' '.join(sys.argv)}")
    try:
        server.start()
        install_crds(server)
        figures = run(options, server, folder)
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
    width = max(len(name) for name, _ in figures.rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in figures.rows))
    if options.json is not None:
        options.json.write_text(json.dumps(figures.values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
