"""python -m faults: the fault campaign (see faults/__init__.py)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from faults import Trial
from faults.campaign import Plan, judge_shared, tell
from faults.catalogue import CATALOGUE
from faults.page import write_page
from faults.report import Counts, counted, write_report


def main() -> None:
    options = _options()
    names = options.only or [fault.name for fault in CATALOGUE]
    worker, num_workers = (int(number) for number in options.part.split("/")) if options.part else (0, options.workers)
    plan = Plan(names=names, short=options.short, seed=options.seed, worker=worker, num_workers=num_workers)
    if options.part:
        tell(plan)
        return
    started = time.monotonic()
    trials = _shown(plan, started)
    seconds = round(time.monotonic() - started, 1)
    counts = counted(trials)
    print(f"{sum(counts.values(), Counts())} in {seconds:,.0f} s", flush=True)
    if not options.short:
        write_report(counts, names=names, seed=options.seed, seconds=seconds, num_workers=num_workers)
        write_page()
    sys.exit(1 if any(trial.outcome == "failed" for _, trial in trials) else 0)


def _shown(plan: Plan, started: float) -> list[tuple[str, Trial]]:
    """All trials; progress and failures as they come."""
    trials = []
    for name, trial in judge_shared(plan):
        trials.append((name, trial))
        if trial.outcome != "passed":
            print(f"{trial.outcome}  {trial.row}: {trial.case}: {trial.why}", flush=True)
        if len(trials) % 25 == 0:
            print(f"{len(trials):,} trials, {time.monotonic() - started:,.0f} s, at {trial.row}", flush=True)
    return trials


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m faults", description="Make things go wrong around brim, and judge."
    )
    parser.add_argument("--short", action="store_true", help="a few of each; writes no report")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[fault.name for fault in CATALOGUE])
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn by chance")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the trials")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # "0/2": what the first of two processes is started with
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
