"""The comparison as a picture (PNG), by matplotlib, which the extra ``bench`` brings."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry_cli.bench.figures import first_token_s, gap_s, gaps, prompts_of
from kvferry_cli.bench.manifests import SIDES, Side
from kvferry_cli.bench.records import Round
from kvferry_cli.bench.report import Report, side_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[Side, str] = {"disaggregated": "#0072b2", "aggregated": "#d55e00"}
INCHES, DOTS_PER_INCH = (12.0, 7.0), 110


def why_not() -> str:
    """Why no plot can be made; empty when it can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return f"needs matplotlib, which is not installed: {sys.executable} -m pip install matplotlib"


def write_plot(report: Report, file: Path) -> None:
    """Draw inter-token latency over time and its distribution, and the time to first token. Raises ``OSError``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3)
    first = None
    for row, side in enumerate(SIDES):
        first = figure.add_subplot(grid[row, :2], sharey=first)
        _timeline(first, side_rounds(report, side)[0], side)
    _distribution(figure.add_subplot(grid[0, 2]), report)
    _first_tokens(figure.add_subplot(grid[1, 2]), report)
    load = report.load
    figure.suptitle(
        f"{report.model} on {report.machine.cpu}, {len(report.machine.cores)} cores: {load.streams} running streams, "
        f"prompts of {load.prompt_tokens} tokens one at a time\n{report.verdict.headline}",
        fontsize=11,
    )
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def _timeline(axes: "Axes", measured: Round, side: Side) -> None:
    """Each token's gap when it came; grey where a long prompt waits for its first token."""
    for trace in prompts_of(measured):
        if trace.events:
            axes.axvspan(trace.sent - measured.began, trace.events[0] - measured.began, color="0.9")
    points = gaps(measured)
    axes.plot(
        [at - measured.began for at, _ in points],
        [1000 * gap for _, gap in points],
        ".",
        markersize=3,
        color=COLOURS[side],
    )
    axes.set_yscale("log")
    axes.set_ylabel("inter-token latency, ms")
    axes.set_xlabel("s")
    axes.set_title(f"{side}, first round (grey: a long prompt is computed)", fontsize=9)


def _distribution(axes: "Axes", report: Report) -> None:
    for side in SIDES:
        values = sorted(1000 * gap for measured in side_rounds(report, side) for gap in gap_s(measured))
        share = [(index + 1) / len(values) for index in range(len(values))]
        axes.plot(values, share, color=COLOURS[side], label=side)
    axes.axhline(0.99, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlabel("inter-token latency, ms")
    axes.set_ylabel("share of tokens")
    axes.set_title("all rounds (dashed: p99)", fontsize=9)
    axes.legend(fontsize=8)


def _first_tokens(axes: "Axes", report: Report) -> None:
    values: list[Sequence[float]] = [
        [value for measured in side_rounds(report, side) for value in first_token_s(measured)] for side in SIDES
    ]
    for place, (side, seconds) in enumerate(zip(SIDES, values, strict=True)):
        axes.plot([place] * len(seconds), seconds, "o", color=COLOURS[side], alpha=0.6)
    axes.set_xticks(range(len(SIDES)), SIDES)
    axes.set_xlim(-0.5, len(SIDES) - 0.5)
    axes.set_ylim(0, 1.15 * max(value for seconds in values for value in seconds))
    axes.set_ylabel("s")
    axes.set_title("time to first token of long prompts", fontsize=9)
