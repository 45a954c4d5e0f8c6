"""``python -m tests.chaos``: chaos on real processes, and a report."""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import report
from tests.chaos.namespaces import sweep, why_not
from tests.chaos.stages import STAGES, included, run_judged

SKIPPED = 3


def main() -> int:
    """Exit status: 0 passed, 1 findings, 3 it cannot be run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the schedules (default: drawn, and told)")
    parser.add_argument("--seconds", type=float, default=600.0, help="about how long it takes (default: 600)")
    parser.add_argument("--stage", choices=sorted(STAGES), help="run this one alone")
    parser.add_argument("--out", type=Path, help="folder of report and logs (default: a new one)")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"chaos: skipped: {reason}", file=sys.stderr)
        return SKIPPED
    if left := sweep():
        print(f"removed what a run had left: {', '.join(left)}")
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    out = Path(tempfile.mkdtemp(prefix="kvferry-chaos-")) if arguments.out is None else arguments.out
    command = f"make chaos SEED={seed} SECONDS={arguments.seconds:g}"
    command += f' ARGS="--stage {arguments.stage}"' if arguments.stage else ""
    print(f"seed {seed}; report and logs in {out}", flush=True)
    begun = time.monotonic()
    names = included(arguments.seconds) if arguments.stage is None else [arguments.stage]
    judged = [run_judged(name, seed, arguments.seconds, out / name, lambda line: _say(begun, line)) for name in names]
    (out / "report.json").write_bytes(report.as_json(judged, command))
    text = report.as_text(judged, command)
    (out / "report.txt").write_text(text + "\n")
    print(f"\n{text}\n{time.monotonic() - begun:.0f} s; {out / 'report.json'}")
    return int(any(stage.findings for stage in judged))


def _say(begun: float, line: str) -> None:
    print(f"[{time.monotonic() - begun:6.1f}] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
