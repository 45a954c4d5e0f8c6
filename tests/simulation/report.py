"""How a failing seed is told: what broke, what the scenario was, the last events that concern it, how to replay it."""

from tests.simulation.run import Report
from tests.simulation.world import TraceLine

_LINES = 40


def describe(report: Report, *, whole: bool = False) -> str:
    """A short text; with ``whole`` every line of the trace."""
    scenario, violation = report.scenario, report.violation
    pods = ", ".join(f"{pod.name} ({pod.role}, {pod.blocks} blocks)" for pod in scenario.pods)
    parts = [
        f"seed {scenario.seed}, profile {scenario.profile.name}: {violation or 'holds'}",
        f"pods: {pods}; requests: {' '.join(request.name for request in scenario.requests)}",
        *(f"fault at {fault.at:.3f}: {fault.kind} {fault.target} {fault.seconds:.2f} s" for fault in scenario.faults),
    ]
    if violation is not None or whole:
        parts += [str(line) for line in (report.lines if whole else _of_interest(report))]
        replay = f"--seed {scenario.seed} --profile {scenario.profile.name} --trace"
        parts.append(f"replay: python -m tests.simulation {replay}")
    return "\n".join(parts)


def _of_interest(report: Report) -> list[TraceLine]:
    assert report.violation is not None
    request = report.violation.request
    lines = report.lines
    if request:
        # The request itself, and the faults, which belong to none.
        lines = [line for line in lines if line.request == request or "FAULT" in line.text or "again" in line.text]
    return lines[-_LINES:]
