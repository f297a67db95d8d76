"""Compare adaptive batching with trainers that are tuned by hand, under limits, and with a wrong memory model.

    make bench-batching

Time of an epoch against TRL's SFTTrainer; losses under real memory limits; running out of memory; padding; planning a
million rows; the loop's own time. Where a CUDA device is at hand, everything runs there, at a size that fills it. Every
run has a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks import batching_tables as tables
from benchmarks.batching_budgets import budget_runs
from benchmarks.batching_epoch import LIMITED, contenders, figures, half_of_whole_batch, hand_search, race, summarize
from benchmarks.batching_padding import paddings
from benchmarks.batching_peers import kernels
from benchmarks.batching_planning import NUM_ROWS, plan_times
from benchmarks.batching_run import Spec
from benchmarks.batching_subject import Subject, prepare_subject
from benchmarks.report import RESULTS, write_report
from benchmarks.subject import EFFECTIVE_BATCH_SIZE

SECTIONS = ("epoch", "budgets", "padding", "planning", "loop")


class Bench:
    """Hold the sections, each of which prints its table and returns its figures."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        import torch

        self._options = options
        device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        num_rows = options.rows or {"cpu": 640, "cuda": 2560}[device]
        say(f"{num_rows} rows, {device}")
        self.subject: Subject = prepare_subject(folder / "subject", num_rows=num_rows, device=device)
        self._spec = Spec(
            folder=str(self.subject.folder), device=device, contender="brim", num_threads=options.threads,
            cache=str(folder / "cache"),
        )  # fmt: skip

    def epoch(self) -> dict[str, Any]:
        options = self._options
        if self.subject.device == "cuda" and kernels()["liger-kernel"] is None:
            say("liger-kernel is not installed: the peers run without its kernels")
        say("the hand search")
        trials = hand_search(self.subject, num_rows=options.search_rows, num_threads=options.threads, say=say)
        tables.show_trials(trials)
        specs = contenders({"brim": self._spec}, trials)
        limits = {}
        num_bytes = half_of_whole_batch(trials)
        if num_bytes is not None and self.subject.device == "cpu" and not options.without_limit:
            limits[f"auto_find{LIMITED}"] = replace(specs["auto_find"], limit_bytes=num_bytes)
            limits[f"brim{LIMITED}"] = replace(specs["brim"], limit_bytes=num_bytes)
        outcomes = race({**specs, **limits}, rounds=options.rounds, once=[f"auto_find{LIMITED}"], say=say)
        found = summarize(outcomes)
        tables.show_contenders(found)
        return {**figures(trials, found), "limit_bytes": num_bytes if limits else None, "peers_kernels": kernels()}

    def budgets(self) -> dict[str, Any]:
        spec = replace(self._spec, num_rows=self._options.budget_rows)
        runs = [run for method in ("lora", "full") for run in budget_runs(spec, method, say=say)]
        tables.show_budgets(runs)
        return {"budgets": [{**asdict(run), "is_met": run.is_met} for run in runs]}

    def padding(self) -> dict[str, Any]:
        import brim

        plan = brim.plan(self.subject.settings(), self.subject.rows)
        assert plan.costs is not None, "the subject fits this device"
        found = paddings(self.subject.lengths(), plan.costs)
        tables.show_paddings(found)
        return {"padding": [asdict(each) for each in found]}

    def planning(self) -> dict[str, Any]:
        found = plan_times(self.subject, num_rows=self._options.planned_rows, rounds=self._options.rounds)
        tables.show_plan_times(found)
        return {"planning": [asdict(each) for each in found]}

    def loop(self) -> dict[str, Any]:
        import torch

        from benchmarks.loop_overhead import CASES, measure

        torch.set_num_threads(1)  # it compares losses to the bit
        with tempfile.TemporaryDirectory() as folder:
            found = measure(CASES[0], Path(folder))
        tables.show_loop(found)
        return {"loop": {**asdict(found), "torch_threads": 1}}


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    options = _options(None)
    folder = tempfile.TemporaryDirectory(prefix="brim-bench-")
    with folder:
        bench = Bench(options, Path(folder.name))
        found: dict[str, Any] = {
            "effective_batch_size": EFFECTIVE_BATCH_SIZE,
            "num_rows": len(bench.subject.lengths()),
            "device": bench.subject.device,
        }
        for section in options.sections:
            say(f"== {section}")
            run: Callable[[], dict[str, Any]] = getattr(bench, section)
            found.update(run())
    name = "batching" if bench.subject.device == "cpu" else "batching_cuda"
    write_report(name, figures=found, num_threads=options.threads, folder=options.results)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Adaptive batching: time, losses under limits, padding, planning.")
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--rows", type=int, help="of the epoch; default: 640, on a GPU 2,560")
    add("--search-rows", type=int, default=96, help="on which the hand search tries each size")
    add("--budget-rows", type=int, default=96, help="of each run under a limit")
    add("--planned-rows", type=int, default=NUM_ROWS)
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2, help="torch's, in each process")
    add("--without-limit", action="store_true", help="do not try auto_find once more with half the memory")
    add("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
