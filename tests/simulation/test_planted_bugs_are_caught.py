"""Bugs that systems of this kind have had are found by the simulation within a few seeds of their own weather."""

import re

import pytest

from tests.simulation.bugs import of_blocks, of_drain, of_kv, of_reports, of_requests, of_resume
from tests.simulation.bugs.registry import BUGS, Bug
from tests.simulation.run import run_scenario
from tests.simulation.scenario import make_scenario

MOST_SEEDS = 60
PLANTED_BY = (of_kv, of_blocks, of_requests, of_resume, of_drain, of_reports)  # importing them fills the list
LEAST_REPORTS = 20


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.name} {bug.report}".strip())
def test_planted_bug_is_caught(bug: Bug) -> None:
    """The bug, planted into a core for the length of this test, breaks an invariant that names what is wrong."""
    found: dict[int, str] = {}
    with bug.planted():
        for seed in range(MOST_SEEDS):
            violation = run_scenario(make_scenario(seed, bug.profile)).violation
            if violation is not None:
                found[seed] = violation.kind
                break
    assert found, f"{bug.name} is not caught by {MOST_SEEDS} seeds of profile {bug.profile}"
    assert next(iter(found.values())) in bug.shows_as, found


def test_bugs_are_named_after_public_reports() -> None:
    """At least twenty stand for a report that anybody can look up, each for another one."""
    reports = {bug.report for bug in BUGS if bug.report}
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in reports), reports
    assert len(reports) >= LEAST_REPORTS


@pytest.mark.timeout(300)
def test_without_a_planted_bug_nothing_is_caught() -> None:
    """The same seeds hold once the bugs are gone: what is caught is the bug, and planting leaves nothing behind."""
    for bug in BUGS:
        with bug.planted():
            pass
    for profile in sorted({bug.profile for bug in BUGS}):
        for seed in range(3):
            report = run_scenario(make_scenario(seed, profile))
            assert report.violation is None, f"{profile}, seed {seed}: {report.violation}"
