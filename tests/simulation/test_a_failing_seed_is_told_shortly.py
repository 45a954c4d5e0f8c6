"""A failing seed becomes a small scenario, a short trace and a command that replays it."""

from tests.simulation.bugs import of_kv
from tests.simulation.bugs.registry import BUGS
from tests.simulation.report import describe
from tests.simulation.run import Report, run_scenario
from tests.simulation.scenario import make_scenario
from tests.simulation.shrink import shrink

_BUG = next(bug for bug in BUGS if bug.planted.__name__ == of_kv.block_order_is_swapped.__name__)


def _failing() -> Report:
    reports = (run_scenario(make_scenario(seed, "everything")) for seed in range(60))
    return next(report for report in reports if report.violation is not None)


def test_shrinking_leaves_what_is_needed() -> None:
    """Most requests and faults go, the violation stays of its kind, and the small scenario fails by itself."""
    with _BUG.planted():
        report = _failing()
        small = shrink(report)
        assert small.violation is not None
        assert report.violation is not None
        assert small.violation.kind == report.violation.kind
        assert len(small.scenario.requests) <= 3 < len(report.scenario.requests)
        assert len(small.scenario.faults) < len(report.scenario.faults)
        again = run_scenario(small.scenario)
        assert again.trace_hash == small.trace_hash


def test_the_story_names_the_violation_the_faults_and_the_command() -> None:
    """At most 40 lines of trace, all of the failing request or of faults, with times and actors."""
    with _BUG.planted():
        report = _failing()
    story = describe(report).splitlines()
    assert report.violation is not None
    request = report.violation.request
    assert "wrong_token" in story[0]
    assert f"--seed {report.scenario.seed} --profile everything --trace" in story[-1]
    trace = [line for line in story if line[:9].strip().replace(".", "").isdigit()]
    assert 5 < len(trace) <= 40
    assert all(f" {request} " in line or "FAULT" in line or "again" in line for line in trace)
