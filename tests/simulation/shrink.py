"""Makes a failing scenario smaller: requests, faults and link troubles are left out one by one while it still fails."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.simulation.links import GOOD
from tests.simulation.run import Report, run_scenario
from tests.simulation.scenario import Scenario


def shrink(report: Report, runs: int = 150) -> Report:
    """The smallest failing scenario found within so many runs; it fails in the same kind of way."""
    assert report.violation is not None
    kind = report.violation.kind
    progress = True
    while progress and runs > 0:
        progress = False
        for smaller in _smaller(report.scenario):
            runs -= 1
            tried = run_scenario(smaller)
            if tried.violation is not None and tried.violation.kind == kind:
                report, progress = tried, True
                break
            if runs <= 0:
                break
    return report


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for request in reversed(scenario.requests):
        if len(scenario.requests) > 1:
            yield scenario.without_request(request.name)
    for index in range(len(scenario.faults)):
        yield scenario.without_fault(index)
    profile = scenario.profile
    for part in ("http", "control", "data"):
        if getattr(profile, part) != GOOD:
            better: dict[str, Any] = {part: GOOD}
            yield replace(scenario, profile=replace(profile, **better))
    if profile.slow_data:
        yield replace(scenario, profile=replace(profile, slow_data=0.0))
    if profile.forged:
        yield replace(scenario, profile=replace(profile, forged=0.0))
    if any(rate != 1.0 for rate in scenario.drift.values()):
        yield replace(scenario, drift={})
