"""Hold what training, evaluation, prediction and export give back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pandas as pd

import brim.report as report
from brim.data.read import EVENTS
from brim.errors import InputError
from brim.infer.metrics import Interval, Measure, intervals, paired_intervals
from brim.train import RunFolder, history
from brim.units import format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from brim.infer.metrics import Divergence


Measures: TypeAlias = Mapping[str, Measure]  # by metric


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Hold a finished run."""

    output_directory: Path | None  # None with `trainer.type: none`, which writes nothing
    num_steps: int  # of the whole run
    num_new_steps: int = 0  # made by this call: fewer where it continued a run, none where that had ended
    best_step: int | None  # the step whose weights were kept; None without a validation split
    metrics: Mapping[str, Mapping[str, float]]  # split -> figures of the kept weights
    num_rows: Mapping[str, int]  # split -> rows that were used
    seconds: float  # of training, evaluations included
    num_left_out: Mapping[str, int] = field(default_factory=dict)  # event of the ledger -> rows of the data not used

    def __repr__(self) -> str:
        run = "nothing trained" if self.output_directory is None else f"run folder {self.output_directory}"
        best = "" if self.best_step is None else f", weights of step {self.best_step:,}"
        rows = ", ".join(f"{number:,} {split}" for split, number in self.num_rows.items() if number)
        evaluated = (
            f"\n  {split}: " + ", ".join(f"{name.replace('_', ' ')} {metrics[name]:.4f}" for name in _SHOWN)
            for split, metrics in self.metrics.items()
        )
        return f"TrainResult: {self.steps_in_words}{best}, {run}\n  rows: {rows}{''.join(evaluated)}"

    @property
    def steps_in_words(self) -> str:
        """Return the steps that a call made, and the time that they took, in words."""
        if self.num_steps and not self.num_new_steps:
            return f"no step was left to make: the run had ended after step {self.num_steps:,}"
        made = f"{format_count(self.num_new_steps, 'step')} in {format_seconds(self.seconds)}"
        return made if self.num_new_steps == self.num_steps else f"{made}, {self.num_steps:,} in all"

    @property
    def history(self) -> pd.DataFrame:
        """Return a row for each step and evaluation, with the columns of metrics.jsonl; NaN where a line lacks one.

        Read from the run's folder each time. Raises InputError where nothing was trained, or it cannot be read.
        """
        return history(self._metrics_file())

    def plot(self) -> Figure:
        """Plot the losses of the steps and evaluations, and below them the learning rate and the effective batch.

        A notebook shows what this returns; `.savefig("losses.png")` writes it. Raises InputError, with the command to
        install it, where matplotlib is missing.
        """
        file = self._metrics_file()
        return report.history_plot(history(file), title=f"Loss of {file.parent.name}")

    def _metrics_file(self) -> Path:
        if self.output_directory is None:
            raise InputError(
                what="there is no history: trainer.type is none, so nothing was trained", fix="train a model"
            )
        return RunFolder(self.output_directory).metrics


_SHOWN = ("loss", "perplexity", "token_accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateResult:
    """Hold a model's figures on rows."""

    split: str
    metrics: Mapping[str, float]  # loss, perplexity, token_accuracy, sequence_accuracy, num_rows, …; bleu, rougeL, …
    intervals: Mapping[str, Interval]  # of the metrics that have one: 95%, bootstrap over rows
    rows: pd.DataFrame  # row, loss (sum, nats), num_correct, num_supervised; with texts response, finish_reason, …
    measures: Measures = field(repr=False)  # what the intervals were drawn from
    comparison: Comparison | None = None  # with the model that was asked for
    num_left_out: Mapping[str, int] = field(default_factory=dict)  # event of the ledger -> rows that have no figures

    def __repr__(self) -> str:
        left_out = [f"rows that {EVENTS[event]}: {number:,}" for event, number in self.num_left_out.items()]
        return "\n".join([f"EvaluateResult: {self.split}", *self.lines(), *left_out])

    def lines(self, *, other: str = "other") -> list[str]:
        """Return the figures as a table, beside the other model's where there is one. other: that model's name."""
        if self.comparison is not None:
            return self.comparison.lines(other=other)
        return report.figure_lines([(self.split, self.metrics, self.intervals)])

    @property
    def frame(self) -> pd.DataFrame:
        """Return a row for each metric: its value, and low and high of its interval, NaN where it has none."""
        return _figures(self.metrics, self.intervals)

    @property
    def loss_interval(self) -> Interval:
        """Return the 95% interval of the loss, by bootstrap over rows."""
        return self.intervals["loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compare two models on the same rows. Differences are this one's less the other's, with paired 95% intervals."""

    other: str  # what it is, for people
    num_rows: int  # that both were evaluated on
    metrics: Mapping[str, float]  # of this one on those rows
    intervals: Mapping[str, Interval]
    other_metrics: Mapping[str, float]
    other_intervals: Mapping[str, Interval]
    differences: Mapping[str, float]
    difference_intervals: Mapping[str, Interval]
    notes: tuple[str, ...]  # what could not be compared, and why

    @classmethod
    def of(cls, ours: Measures, theirs: Measures, *, other: str, num_rows: int, notes: Sequence[str]) -> Comparison:
        """Compare what was measured on the same rows."""
        return cls(
            other=other,
            num_rows=num_rows,
            metrics={name: measure.value for name, measure in ours.items()},
            intervals=intervals(ours, num_rows),
            other_metrics={name: measure.value for name, measure in theirs.items()},
            other_intervals=intervals(theirs, num_rows),
            differences={name: ours[name].value - theirs[name].value for name in ours if name in theirs},
            difference_intervals=paired_intervals(ours, theirs, num_rows),
            notes=tuple(notes),
        )

    def __repr__(self) -> str:
        return "\n".join(["Comparison", *self.lines()])

    def lines(self, *, other: str = "other") -> list[str]:
        """Return the figures of both as a table. other: the other model's name."""
        columns = [
            (other, self.other_metrics, self.other_intervals),
            ("this model", self.metrics, self.intervals),
            ("difference, paired", self.differences, self.difference_intervals),
        ]
        table = report.figure_lines(columns, notes=self.notes)
        return [f"{format_count(self.num_rows, 'row')}; the other model is {self.other}", "", *table]

    @property
    def frame(self) -> pd.DataFrame:
        """Return a row for each metric that both have: this model's value, the other's, and the difference."""
        differences = _figures(self.differences, self.difference_intervals).rename(columns={"value": "difference"})
        values = pd.DataFrame({"value": self.metrics, "other": self.other_metrics}, index=differences.index)
        joined: pd.DataFrame = values.join(differences)
        return joined


def _figures(metrics: Mapping[str, float], intervals: Mapping[str, Interval]) -> pd.DataFrame:
    ends = {name: intervals.get(name, Interval(low=math.nan, high=math.nan)) for name in metrics}
    frame: pd.DataFrame = pd.DataFrame(
        [(metrics[name], ends[name].low, ends[name].high) for name in metrics],
        index=pd.Index(metrics, name="metric"),
        columns=["value", "low", "high"],
    )
    return frame


_ROWS_SHOWN = 5  # of those that are left out for one reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictResult:
    """Hold a model's texts, in the order of the input: `len` of them, fewer than its rows where some are left out."""

    output: Path | None  # the file, where one was asked for
    ledger: Path | None  # the file beside it that names the rows that were cut or left out, where there are any
    summary: Mapping[str, Any]  # rows, tokens, throughput, …; also in the file <output>.summary.json
    seconds: float  # of generating, in this process
    num_new_rows: int  # generated by this call: fewer where it continued a job, none where that was complete
    left_out: pd.DataFrame = field(repr=False)  # row, reason (an event of the ledger), why; for each row without text
    read_predictions: Callable[[], pd.DataFrame] = field(repr=False)

    def __len__(self) -> int:
        return int(self.summary["num_rows"])

    def __repr__(self) -> str:
        rows = (
            format_count(len(self), "row")
            if self.left_out.empty
            else f"{len(self):,} of {format_count(len(self) + len(self.left_out), 'row')}"
        )
        place = "in memory" if self.output is None else str(self.output)
        lines = [f"PredictResult: {rows}, {place}"]
        for reason, of_reason in self.left_out.groupby("reason", sort=False):
            shown = of_reason["row"].head(_ROWS_SHOWN)
            numbers = ", ".join(map(str, shown)) + (", …" if len(shown) < len(of_reason) else "")
            lines.append(f"  {len(of_reason):,} {EVENTS[str(reason)]} (row {numbers}; see .left_out)")
        return "\n".join(lines)

    @property
    def num_left_out(self) -> Mapping[str, int]:
        """Count the rows without a text, by reason."""
        return {str(reason): int(number) for reason, number in self.left_out["reason"].value_counts().items()}

    @property
    def predictions(self) -> pd.DataFrame:
        """Return row, the input's columns, <output>_response, finish_reason, and counts of tokens.

        The counts are num_prompt_tokens and num_response_tokens. With scores there is log_probability, too, and of a
        category <output>_predictions, its label. `row` is the number in the input; rows that are left out are not in
        the frame, and its `attrs["left_out"]` has their numbers by reason. Read the file of a large output instead: a
        frame is in memory as a whole.
        """
        frame = self.read_predictions()
        by_reason = self.left_out.groupby("reason", sort=False)["row"]
        frame.attrs["left_out"] = {str(reason): rows.tolist() for reason, rows in by_reason}
        return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Hold where an exported model is."""

    path: Path
    kind: Literal["adapter", "merged", "full"]
    num_bytes: int  # of all files
    divergence: Divergence | None  # of the merged model from the unmerged one; None where nothing was merged
    probe: str | None  # the tokens on which it was measured, in words

    def __repr__(self) -> str:
        return "ExportResult: " + "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Say what it is and where, and how far a merged model is from the unmerged one."""
        lines = [f"{_KINDS[self.kind]}: {self.path} ({self.num_bytes:,} bytes)"]
        found = self.divergence
        if found is not None:
            lines.append(
                f"merged and unmerged are {found.mean_kl:.2g} nats a token apart (mean KL divergence over "
                f"{found.num_tokens:,} tokens of {self.probe}); {found.same_top:.2%} of the likeliest tokens are the "
                f"same, logits differ by at most {found.max_logit_difference:.2g}"
            )
        return lines


_KINDS = {"adapter": "adapter, for PEFT", "full": "model, for transformers", "merged": "merged model, for transformers"}
