"""Measure batch inference: rows a second, memory under limits, kills, against transformers and those who halve.

    make bench-inference

The example's model, fine-tuned for some minutes so that it ends its answers, and prompts from modules that it has not
seen. Greedy, in fp32, on this machine's CPU. Every run has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    inference_limited as limited,
    inference_memory as memory,
    inference_resumed as resumed,
    inference_rows as growth,
    inference_tables as tables,
)
from benchmarks.inference_run import Spec
from benchmarks.inference_speed import BATCHES, contenders, figures, hand_search, race, summarize
from benchmarks.inference_subject import MAX_NEW_TOKENS, NUM_ROWS, prepare_subject, prompt_lengths
from benchmarks.report import RESULTS, write_report

SECTIONS = ("speed", "limits", "peak", "kills", "rows")


class Bench:
    """Hold the sections, each of which prints its table and returns its figures."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self.subject = prepare_subject(folder / "subject")
        self._spec = Spec(
            folder=str(self.subject.folder),
            contender="brim",
            num_threads=options.threads,
            num_rows=options.rows,
            cache=str(folder / "cache"),
        )

    def speed(self) -> dict[str, Any]:
        options = self._options
        say(f"{options.rows} rows; the hand search, on {options.search_rows}")
        trials = hand_search(self._spec, num_rows=options.search_rows, batches=options.batches, say=say)
        tables.show_trials(trials)
        specs = contenders(self._spec, trials)
        outcomes = race(specs, rounds=options.rounds, say=say)
        found = summarize(specs, outcomes)
        tables.show_contenders(found)
        return {"speed": figures(trials, found, outcomes, prompt_lengths(self.subject.rows(options.rows)))}

    def limits(self) -> dict[str, Any]:
        found = limited.rooms(
            self.subject,
            rooms_mib=self._options.rooms_mib,
            num_threads=self._options.threads,
            cache_folder=str(self._folder / "cache"),
            say=say,
        )
        tables.show_rooms(found)
        return {"limits": limited.figures(found)}

    def peak(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            folders = memory.write_models(Path(name))
            found = [memory.figure(folders, shape) for shape in memory.SHAPES]
        memory.show(found)
        return {"peak": memory.summary(found)}

    def kills(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            found = resumed.kill_and_resume(
                self.subject,
                Path(name) / "kills",
                num_rows=self._options.kill_rows,
                num_kills=self._options.kills,
                num_threads=self._options.threads,
            )
        tables.show_resumed(found)
        return {"kills": resumed.figures(found)}

    def rows(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            found = growth.peaks(
                self.subject,
                Path(name) / "rows",
                num_rows=self._options.few_rows,
                num_threads=self._options.threads,
            )
        tables.show_growth(found)
        return {"rows": growth.summary(found)}


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    options = _options(None)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="brim-bench-") as name:
        bench = Bench(options, options.folder or Path(name))
        found: dict[str, Any] = {"num_rows": options.rows, "max_new_tokens": MAX_NEW_TOKENS}
        for section in options.sections:
            say(f"== {section}")
            run: Callable[[], dict[str, Any]] = getattr(bench, section)
            found.update(run())
            # After each, so that what was measured is not lost with what was not.
            write_report("inference", figures=found, num_threads=options.threads, folder=options.results)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Batch inference: speed, memory, kills.")
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--rows", type=int, default=NUM_ROWS)
    add("--search-rows", type=int, default=128, help="on which the hand search tries each size")
    add("--batches", type=int, nargs="+", default=list(BATCHES), help="sizes that the hand search tries")
    add("--rounds", type=int, default=3)
    add("--rooms-mib", type=int, nargs="+", default=list(limited.ROOMS_MIB), help="that limits leave beside the model")
    add("--kills", type=int, default=resumed.NUM_KILLS)
    add("--kill-rows", type=int, default=resumed.NUM_ROWS, help="of the prediction that is killed")
    add("--few-rows", type=int, default=growth.NUM_ROWS, help="of the prediction whose memory is compared")
    add("--threads", type=int, default=2, help="torch's, in each process")
    add("--folder", type=Path, help="keeps the model and the prompts; what is there is not made again")
    add("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
