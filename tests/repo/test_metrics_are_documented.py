"""docs/metrics.md and what the processes serve name the same metrics, with the same labels."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from kvferry_operator.shell.metrics import OperatorMetrics
from kvferry_router.discovery.api_server import REASONS
from kvferry_router.discovery.slices import LEFT_OUT
from kvferry_router.metrics import RouterMetrics
from kvferry_runtime.engine.messages import EngineStats
from kvferry_runtime.server.metrics import PodMetrics
from kvferry_service.metrics import PREFIX, make_registry
from kvferry_wire.state import Load

from .sources import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
NAMED = re.compile(r"`kvferry:([a-z0-9_]+)(?:\{([a-z_,]+)\})?`")
# Of other processes, by what their names begin with.
ROUTER, OPERATOR = "router_", "operator_"


def documented() -> dict[str, tuple[str, ...]]:
    """Every name of the page with its labels; one that stands there again without labels adds nothing."""
    found: dict[str, tuple[str, ...]] = {}
    for name, labels in NAMED.findall(PAGE):
        found[name] = tuple(sorted(labels.split(","))) if labels else found.get(name, ())
    return found


def process_of(name: str) -> str:
    """The process that serves a metric."""
    return next((kind for kind, begin in (("router", ROUTER), ("operator", OPERATOR)) if name.startswith(begin)), "pod")


def served(registry: CollectorRegistry) -> dict[str, tuple[str, ...]]:
    """Every name of a registry with its labels, as the exposition has it."""
    found: dict[str, tuple[str, ...]] = {}
    labelled = dict(label_names(registry))
    for family in registry.collect():
        if family.name.startswith(PREFIX):
            name = family.name.removeprefix(PREFIX)
            own = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name + ("_total" if family.type == "counter" else "")] = labelled.get(name, tuple(sorted(own)))
    return found


def label_names(registry: CollectorRegistry) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Labels of metrics that may have no sample yet."""
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            yield collector._name.removeprefix(PREFIX), tuple(sorted(collector._labelnames))


def engine() -> Any:
    """An engine that has said something of each kind."""
    load = Load(running=0, waiting=0, queued_tokens=0, free_blocks=1, total_blocks=1, leases=0, draining=False)
    stats = EngineStats(pulls_failed={"connect": 1}, leases_ended={"released": 1})
    return SimpleNamespace(load=load, stats=stats, starts=1, not_ready=lambda: "", running=lambda: 0)


def of_router() -> CollectorRegistry:
    return RouterMetrics(make_registry()).registry


def of_pod() -> CollectorRegistry:
    return PodMetrics(engine()).registry


def of_operator() -> CollectorRegistry:
    return OperatorMetrics(make_registry()).registry


OF = {"router": of_router, "operator": of_operator, "pod": of_pod}


@pytest.mark.parametrize("process", OF)
def test_page_and_processes_agree(process: str) -> None:
    """No metric without its line, no line without its metric, and the same labels."""
    own = served(OF[process]())
    told = {name: labels for name, labels in documented().items() if process_of(name) == process}
    assert {name: own[name] for name in own if name not in told} == {}, "served, but not in docs/metrics.md"
    assert {name: told[name] for name in told if name not in own} == {}, "in docs/metrics.md, but not served"
    assert told == own


def test_no_metric_has_a_label_that_grows_with_use() -> None:
    """Tenants, ids, pods and addresses are in no label of any process."""
    names = {label for registry in (of_router(), of_pod()) for labels in served(registry).values() for label in labels}
    assert names <= {
        "outcome",
        "path",
        "reason",
        "cause",
        "kind",
        "role",
        "state",
        "confirmed",
        "why",
        "finished_reason",
    }


@pytest.mark.parametrize("value", [*REASONS, *LEFT_OUT])
def test_reasons_of_discovery_are_explained(value: str) -> None:
    """Each value that an alert may name."""
    line = next(line for line in PAGE.splitlines() if "router_discovery_failures" in line and line.startswith("|"))
    other = next(line for line in PAGE.splitlines() if "router_discovery_left_out" in line)
    assert f"`{value}`" in line + other
