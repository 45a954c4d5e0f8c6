"""``python -m tests.simulation``: run seeds, tell what fails, replay one."""

import argparse
import logging
import sys
import time
from collections import Counter

from tests.simulation.report import describe
from tests.simulation.run import run_scenario
from tests.simulation.scenario import PROFILES, make_scenario
from tests.simulation.shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run (default: 500)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument(
        "--profile", choices=[profile.name for profile in PROFILES], help="of the seeds (default: by seed)"
    )
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds although some fail")
    arguments = parser.parse_args()
    logging.disable()  # what cores say of faults is in the trace, and there are many faults
    if arguments.seed is not None:
        return _one(arguments.seed, arguments.profile, trace=arguments.trace)
    return _many(range(arguments.start, arguments.start + arguments.seeds), arguments.profile, arguments.keep_going)


def _one(seed: int, profile: str | None, *, trace: bool) -> int:
    report = run_scenario(make_scenario(seed, profile))
    print(describe(report, whole=trace))
    print(f"trace {report.trace_hash[:16]}, {report.events} events, {report.ended_at:.1f} virtual s")
    return 0 if report.violation is None else 1


def _many(seeds: range, profile: str | None, keep_going: bool) -> int:
    began = time.process_time()
    totals: Counter[str] = Counter()
    events = failed = 0
    for seed in seeds:
        report = run_scenario(make_scenario(seed, profile))
        totals.update(report.counts)
        events += report.events
        if report.violation is None:
            continue
        failed += 1
        print(describe(shrink(report)), flush=True)
        if not keep_going:
            return 1
    seconds = time.process_time() - began
    print(f"{len(seeds)} seeds, {failed} failed, {events} events, {seconds:.1f} s of CPU")
    print(", ".join(f"{name} {count}" for name, count in sorted(totals.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
