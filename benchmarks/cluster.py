"""The operator on a cluster with nodes: from a manifest to an answer, how quiet it is at rest, how soon after a fault.

    make cluster-up; eval "$(make -s cluster-env)"
    helm install kvferry charts/kvferry -n kvferry-system --create-namespace -f e2e/values-kind.yaml
    python benchmarks/cluster.py [--rounds 3] [--rest 60] [--json FILE]

Prints:

- apply to Ready: from `kubectl apply` of the example to the condition, without the slowest pod's own start (from its
  place on a node to its readiness: image, model, load), and what that start took;
- drift to repair: from the deletion of a child to its return;
- calls of the API per minute at rest, by the operator's own count, but for the Lease and the watches;
- from the word that a pod of a role terminates until no EndpointSlice calls it ready, so that it gets nothing new;
- failover after SIGTERM (the pod is deleted) and after kill -9 (of its container), until a child deleted meanwhile is
  back. With one replica that holds the new process's start.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from e2e.harness.departures import departures  # noqa: E402 - the rig of the tests is that of the figures
from e2e.harness.kubectl import Kubectl, KubectlError, Object, conditions  # noqa: E402
from e2e.harness.nodes import own_nodes  # noqa: E402
from e2e.harness.service import Service  # noqa: E402
from e2e.harness.waiting import wait_for  # noqa: E402

NAME = "figures"
SYSTEM = "kvferry-system"
CALLS = "kvferry:operator_api_calls_total"
DRIFTS = ("service/{}-router", "configmap/{}-plan", "serviceaccount/{}-engine", "networkpolicy/{}-deny")
POLL_S = 0.02


class Figures:
    """What was measured, in order."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)
        print(f"  {name}: {value:.2f}", flush=True)

    def table(self) -> str:
        rows = ["", "| | p50 | worst | runs |", "|---|---|---|---|"]
        for name, values in self.values.items():
            rows.append(f"| {name} | {statistics.median(values):.2f} | {max(values):.2f} | {len(values)} |")
        return "\n".join(rows)


def moment(pod: Object, condition: str) -> float:
    """When a condition last changed; whole seconds, as Kubernetes writes them."""
    told = conditions(pod)[condition]["lastTransitionTime"]
    return datetime.fromisoformat(told).timestamp()


def measure_ready(figures: Figures, service: Service) -> None:
    """One manifest, from nothing to an answer."""
    begun = time.time()
    service.apply()
    service.wait_ready(300)
    ready = time.time() - begun
    pods = [pod for role in ("prefill", "decode", "router") for pod in service.pods(role)]
    starts = [moment(pod, "Ready") - moment(pod, "PodScheduled") for pod in pods]
    figures.add("apply to Ready, s", ready)
    figures.add("slowest pod's own start, s", max(starts))
    figures.add("apply to Ready without it, s", ready - max(starts))


def uid(service: Service, child: str) -> str:
    found = service.kubectl.run("get", child, "--ignore-not-found", "--output=jsonpath={.metadata.uid}")
    return found.strip()


def delete_and_wait(service: Service, child: str, seconds: float = 60.0) -> float:
    """Delete a child; returns how long it took to be back."""
    before = uid(service, child)
    service.kubectl.run("delete", child, "--wait=false")
    begun = time.monotonic()
    while uid(service, child) in ("", before):
        if time.monotonic() - begun > seconds:
            raise SystemExit(f"{child} was not back within {seconds:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - begun


def measure_leaving(figures: Figures, service: Service) -> None:
    """A pod of each role is deleted, and replaced."""
    for role in ("prefill", "decode", "router"):
        with departures(service) as leaving:
            service.kubectl.delete("pod", service.pod(role), "--wait=false")
            (gone,) = leaving.wait_gone(1, 60)
        figures.add("terminating to not ready, s", gone.unready_after_s)
    service.wait_ready(300)


def operator_pods() -> list[Object]:
    pods = Kubectl(SYSTEM).list("pods", "app.kubernetes.io/instance=kvferry")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def calls() -> float:
    """Of all operators, the Lease's apart."""
    total = 0.0
    for pod in operator_pods():
        path = f"/api/v1/namespaces/{SYSTEM}/pods/{pod['metadata']['name']}:9090/proxy/metrics"
        for line in Kubectl().fetch(path).splitlines():
            if line.startswith(CALLS) and 'kind="Lease"' not in line:
                total += float(line.rpartition(" ")[2])
    return total


def measure_rest(figures: Figures, seconds: float) -> None:
    before = calls()
    threading.Event().wait(seconds)
    figures.add("calls per minute at rest", (calls() - before) * 60 / seconds)


def holder() -> str:
    """The operator's pod that leads."""
    (lease,) = Kubectl(SYSTEM).list("leases")
    held: str = lease["spec"].get("holderIdentity", "")
    return held


def leader_pod() -> Object:
    held = wait_for(holder, "a leader", 60)
    (pod,) = [pod for pod in operator_pods() if held.startswith(pod["metadata"]["name"])]
    return pod


def measure_failover(figures: Figures, service: Service, how: str) -> None:
    """From the leader's end until the next one has put back a child that was deleted in the same moment."""
    nodes, pod = own_nodes(), leader_pod()
    child = f"configmap/{service.name}-plan"
    before = uid(service, child)
    begun = time.monotonic()
    if how == "SIGTERM":
        Kubectl(SYSTEM).delete("pod", pod["metadata"]["name"], "--wait=false")
    else:
        assert nodes is not None, "kill -9 needs nodes of `make cluster-up`"
        nodes.kill_container(pod, pod["spec"]["containers"][0]["name"])
        begun = time.monotonic()
    service.kubectl.run("delete", child, "--wait=false")
    wait_for(lambda: uid(service, child) not in ("", before), "the next operator's repair", 120)
    figures.add(f"failover after {how}, s", time.monotonic() - begun)
    wait_for(lambda: all(is_ready(pod) for pod in operator_pods()), "ready operators", 120)


def is_ready(pod: Object) -> bool:
    return conditions(pod).get("Ready", {}).get("status") == "True"


def measure(options: argparse.Namespace) -> Figures:
    figures = Figures()
    service = Service(Kubectl(options.namespace), NAME)
    for left in reversed(range(options.rounds)):
        measure_ready(figures, service)
        if left:
            service.delete()
    try:
        for _ in range(options.rounds):
            for child in DRIFTS:
                figures.add("drift to repair, s", delete_and_wait(service, child.format(NAME)))
            measure_leaving(figures, service)
        threading.Event().wait(5)
        measure_rest(figures, options.rest)
        for _ in range(options.rounds):
            for how in ("SIGTERM", "kill -9"):
                measure_failover(figures, service, how)
    finally:
        service.delete()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="repeats of each figure")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds of rest that are watched")
    parser.add_argument("--namespace", default="default", help="one that the operator watches")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    try:
        Kubectl().run("get", "namespaces", timeout_s=30)
    except (KubectlError, FileNotFoundError) as error:
        print(f'skipped: no cluster: {error}; make cluster-up, then eval "$(make -s cluster-env)"')
        return 0
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    figures = measure(options)
    print(figures.table())
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(figures.values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
