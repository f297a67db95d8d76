"""What training, evaluation and prediction give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from brim.infer.bootstrap import Interval, Measure

if TYPE_CHECKING:
    from brim.infer.divergence import Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """A finished run."""

    output_directory: Path | None  # None with `trainer.type: none`, which writes nothing
    num_steps: int
    best_step: int | None  # the step whose weights were kept; None without a validation split
    metrics: Mapping[str, Mapping[str, float]]  # split -> figures of the kept weights
    num_rows: Mapping[str, int]  # split -> rows
    seconds: float  # of training, evaluations included


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateResult:
    """A model's figures on rows."""

    split: str
    metrics: Mapping[str, float]  # loss, perplexity, token_accuracy, sequence_accuracy, num_rows, …; bleu, rougeL, …
    intervals: Mapping[str, Interval]  # of the metrics that have one: 95%, bootstrap over rows
    rows: pd.DataFrame  # row, loss (sum, nats), num_correct, num_supervised; with texts response, finish_reason, …
    measures: Mapping[str, Measure] = field(repr=False)  # what the intervals were drawn from
    comparison: Comparison | None = None  # with the model that was asked for

    @property
    def loss_interval(self) -> Interval:
        """95%, bootstrap over rows."""
        return self.intervals["loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same rows. Differences are this one's less the other's, with paired 95% intervals."""

    other: str  # what it is, for people
    num_rows: int  # that both were evaluated on
    metrics: Mapping[str, float]  # of this one on those rows
    intervals: Mapping[str, Interval]
    other_metrics: Mapping[str, float]
    other_intervals: Mapping[str, Interval]
    differences: Mapping[str, float]
    difference_intervals: Mapping[str, Interval]
    notes: tuple[str, ...]  # what could not be compared, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictResult:
    """A model's texts, in the order of the input."""

    output: Path | None  # the file, where one was asked for
    ledger: Path | None  # the file beside it that names the rows that were cut or left out, where there are any
    summary: Mapping[str, Any]  # rows, tokens, throughput, …; also in the file <output>.summary.json
    seconds: float  # of generating, in this process
    read_predictions: Callable[[], pd.DataFrame] = field(repr=False)

    @property
    def predictions(self) -> pd.DataFrame:
        """row, the input's columns, <output>_response, finish_reason, num_prompt_tokens, num_response_tokens.

        With scores log_probability, too, and of a category <output>_predictions, its label. Of a large output, read the
        file instead: a frame is in memory as a whole.
        """
        return self.read_predictions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A model in a folder of its own."""

    path: Path
    kind: Literal["adapter", "merged", "full"]
    num_bytes: int  # of all files
    divergence: Divergence | None  # of the merged model from the unmerged one; None where nothing was merged
    probe: str | None  # the tokens on which it was measured, in words
