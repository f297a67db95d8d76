"""Train one run of a comparison in its own process, to its end, and hold what a comparison gives back.

The last weights of a run are judged. compare.json is written and read here.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from brim.errors import OutputError
from brim.notes import Note, Say, kind_of, short_of, topic_of
from brim.report import PageTable, Runs, Summary, comparison_notes, comparison_tables, final_split, summaries
from brim.train import Observer, Record, RunFigures
from brim.workflows.runs import Ended, Stop, Tell, TrainOrder, run_child

FILE = "compare.json"


_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """Hold one run of a comparison."""

    name: str  # of its configuration
    seed: int
    outcome: Literal["finished", "failed"]
    figures: RunFigures | None  # of a finished run
    rows: Mapping[str, str]  # of a finished run: split -> a digest of which rows it holds
    error: str | None  # of a failed one


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult:
    """Hold the runs of several configurations, trained with the same seeds on the same number of rows."""

    output_directory: Path
    files: Mapping[str, str]  # name -> its configuration, the first being what the others are compared to
    digests: Mapping[str, str]  # name -> digest of its settings
    seeds: tuple[int, ...]
    changes: tuple[str, ...]  # what the comparison set otherwise than the configurations say
    runs: tuple[ComparedRun, ...]  # that have ended, in the order in which they ran

    def __repr__(self) -> str:
        return f"CompareResult: {self.output_directory}\n\n{self.markdown()}".rstrip()

    def _repr_markdown_(self) -> str:
        """Return the tables for notebooks, which render them."""
        return self.markdown()

    @property
    def failed(self) -> list[ComparedRun]:
        return [run for run in self.runs if run.outcome == "failed"]

    @property
    def figures(self) -> dict[str, Runs]:
        """Return the figures of the finished runs: name -> seed -> figures."""
        by_name: dict[str, dict[int, RunFigures]] = {name: {} for name in self.files}
        for run in sorted(self.runs, key=lambda run: run.seed):
            if run.figures is not None:
                by_name[run.name][run.seed] = run.figures
        return dict(by_name)

    @property
    def split(self) -> str:
        """Return the split whose final loss counts: "validation", or "train" where some run was not evaluated."""
        return final_split(self.figures)

    @property
    def summaries(self) -> list[Summary]:
        """Summarize each configuration that has a finished run, in the order in which they were given."""
        return summaries(self.figures)

    @property
    def notes(self) -> list[str]:
        """Return the notes that a reader of the figures needs."""
        rows = {(run.name, run.seed): run.rows for run in self.runs}
        return [*self.changes, *comparison_notes(self.figures, rows, seeds=self.seeds), *self._failures()]

    def tables(self, *, with_runs: bool = False) -> list[PageTable]:
        """Return the losses with their differences, then what the runs took; with_runs: every run, too."""
        found, splits = self.summaries, self._splits()
        if not found:
            return []
        return comparison_tables(found, self.figures if with_runs else {}, first=next(iter(self.files)), splits=splits)

    def markdown(self) -> str:
        """Return the tables and notes in GitHub's Markdown."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join([*(table.markdown() for table in self.tables()), notes]) + "\n"

    def as_json(self, *, with_curves: bool = True) -> dict[str, Any]:
        """Return all figures for compare.json; what is not a finite number is null."""
        return {
            "format": _FORMAT,
            "seeds": list(self.seeds),
            "configurations": [
                {"name": name, "file": file, "digest": self.digests[name]} for name, file in self.files.items()
            ],
            "changes": list(self.changes),
            "notes": self.notes,
            "split": self.split,
            "summaries": [each.as_json() for each in self.summaries],
            "runs": [_run_as_json(run, with_curves=with_curves) for run in self.runs],
        }

    def _splits(self) -> list[str]:
        """Return the splits that the tables show: the one that counts, and the test rows where all runs have them."""
        every = [run for found in self.figures.values() for run in found.values()]
        return [self.split, *(["test"] if all("test" in run.losses for run in every) else [])]

    def _failures(self) -> Iterator[str]:
        for run in self.failed:
            yield f"{run.name}, seed {run.seed}, failed: {(run.error or '').splitlines()[0]}"


def read_runs(file: Path) -> tuple[dict[str, str], tuple[int, ...], tuple[ComparedRun, ...]]:
    """Read a compare.json: digests of the configurations by name, seeds, and runs. Raises OutputError."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["format"] != _FORMAT:
            raise ValueError(f"its format is {told['format']}")
        digests = {each["name"]: each["digest"] for each in told["configurations"]}
        return digests, tuple(told["seeds"]), tuple(_run_of_json(run) for run in told["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            what=f"the comparison that was begun here cannot be read: {error}",
            where=str(file),
            fix="choose another folder with --output-directory",
        ) from error


def _run_as_json(run: ComparedRun, *, with_curves: bool) -> dict[str, Any]:
    figures = None if run.figures is None else run.figures.as_json()
    if figures is not None and not with_curves:
        figures = {name: value for name, value in figures.items() if not name.endswith("_curve")}
    told = {"name": run.name, "seed": run.seed, "folder": f"{run.name}/seed-{run.seed}", "outcome": run.outcome}
    return {**told, "figures": figures, "rows": dict(run.rows), "error": run.error}


def _run_of_json(told: Mapping[str, Any]) -> ComparedRun:
    known = {name: told[name] for name in ("name", "seed", "outcome", "rows", "error")}
    return ComparedRun(**known, figures=None if told["figures"] is None else RunFigures.of_json(told["figures"]))


def run_in_process(order: TrainOrder, *, observer: Observer, say: Say, stop: Stop) -> Ended:
    """Train in new processes, and pass their messages on; they save a checkpoint and stop once this process is gone.

    The result is, for each split, a digest of which rows it holds.
    """
    heard = _Heard(observer, say)
    try:
        return run_child(
            train,
            asdict(order),
            on_message=heard,
            stop=stop,
            when_alone=signal.SIGTERM,
            num_processes=order.num_processes,
        )
    finally:
        heard.close()


class _Heard:
    """Pass the child's messages on to an observer, and close it where the child could not."""

    def __init__(self, observer: Observer, say: Say) -> None:
        self._observer, self._say = observer, say
        self._is_open = False

    def __call__(self, message: Mapping[str, Any]) -> None:
        if "say" in message:
            self._say(Note(**message["say"]))
        elif "start" in message:
            self._is_open = True
            self._observer.start(**message["start"])
        elif "record" in message:
            self._observer.write(message["record"])
        elif "close" in message:
            self.close()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._observer.close()


class Told:
    """Send what an observer hears to the process that started this one."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._tell(start={"first_step": first_step, "total_steps": total_steps, "total_samples": total_samples})

    def write(self, record: Record) -> None:
        self._tell(record=record)

    def close(self) -> None:
        self._tell(close=True)

    def say(self, line: str) -> None:
        self._tell(say={"text": line, "kind": kind_of(line), "topic": topic_of(line), "short": short_of(line)})


def train(order: Mapping[str, Any], tell: Tell) -> dict[str, str]:
    """Carry out a `TrainOrder`, in the child."""
    told = Told(tell)
    return run(TrainOrder(**order), observer=told, say=told.say)


def run(order: TrainOrder, *, observer: Observer, say: Say) -> dict[str, str]:
    """Train, and keep the last weights. Return, for each split, a digest of which rows it holds."""
    from brim.workflows.training import train_configuration  # here, where Ctrl-C is caught: torch takes seconds

    prepared = train_configuration(order, observer=observer, say=say, weights="last")
    return {
        split: hashlib.sha256(rows.keys.astype("<i8").tobytes()).hexdigest() for split, rows in prepared.splits.items()
    }
