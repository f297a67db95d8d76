"""Learn from the training split what numbers, labels and missing values of a column become, and turn them back.

A number is normalised for the model and restored for a person. A label becomes its position: of an input behind 0,
which stands for every unknown one; of an output among all labels, the most frequent first.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from brim.config.text import misspelt, shortened
from brim.data.read import Source
from brim.data.table.cells import Feature, Floats, Normalization, Strategy
from brim.data.usable import require_labels
from brim.errors import DataError, Problem
from brim.notes import warning
from brim.storage import write_text
from brim.units import format_count

MOST_LABELS = 100_000  # of an output
UNKNOWN = "<UNK>"  # Ludwig's word for labels of an input that are none of the known ones
TRUTH_VALUES = ("false", "true")


# Ludwig's words.
_WORDS = {
    **dict.fromkeys(("false", "f", "no", "n", "0", "0.0", "-1", "-1.0"), 0),
    **dict.fromkeys(("true", "t", "yes", "y", "1", "1.0"), 1),
}


_LEAST_WIDTH = 1e-12  # of the largest number: what varies less does not vary


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Map a column's numbers to those that a model reads: (x − center) ÷ width, of log(1 + x) where `is_log`."""

    center: float = 0.0
    width: float = 1.0
    is_log: bool = False

    @classmethod
    def of(cls, values: Floats, normalization: Normalization | None) -> Scale:
        """Return the scale for these values, of which there is at least one, as Ludwig defines it.

        zscore: mean and deviation (of the values, not an estimate for others); minmax: least and greatest; iq: median
        and the quartiles' distance. Where that distance is nothing, the width is 1.
        """
        if normalization in (None, "log1p"):
            return cls(is_log=normalization == "log1p")
        if normalization == "zscore":
            center, width = float(values.mean()), float(values.std())
        elif normalization == "minmax":
            center, width = float(values.min()), float(np.ptp(values))
        else:
            low, center, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            width = high - low
        least = max(_LEAST_WIDTH * float(np.abs(values).max()), np.finfo(np.float32).tiny)
        return cls(center=center, width=width if width > least else 1.0)

    def normalised(self, values: Floats) -> Floats:
        """Return what a model reads in place of these numbers. NaN stays NaN."""
        values = np.log1p(values) if self.is_log else values
        return (values - self.center) / self.width

    def restored(self, values: npt.ArrayLike) -> Floats:
        """Return the column's numbers of these normalised ones."""
        plain = np.asarray(values, dtype=np.float64) * self.width + self.center
        return np.asarray(np.expm1(plain) if self.is_log else plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Hold all that prediction needs of an output; it is kept with the run."""

    name: str
    type: Literal["category", "binary", "number"]
    labels: tuple[str, ...]  # of a category, the most frequent first; of a binary: false, true
    mean: float
    deviation: float  # of a number's targets, on the training split, as the column has them
    scale: Scale = Scale()  # of a number: the head's values are normalised
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """Hold what was learned of a column. An input's label has the position behind 0, an output's its own."""

    name: str
    type: Literal["category", "binary", "number"]
    is_output: bool
    labels: tuple[str, ...] = ()
    encoder: Literal["onehot", "dense"] = "dense"
    mean: float = 0.0
    deviation: float = 0.0
    scale: Scale = Scale()
    fill: float | None = None  # in place of a missing value; None: there is no value
    low: float | None = None  # numbers below or above are outliers; None: none is
    high: float | None = None
    outlier_fill: float | None = None  # in place of an outlier; None: its row is left out
    temperature: float = 1.0  # of an output, fitted on the validation split

    @property
    def first(self) -> int:
        """Return the position of the first label."""
        return int(self.type == "category" and not self.is_output)

    @property
    def width(self) -> int:
        """Return how many numbers the model reads; of a dense category, how many embeddings it has."""
        return 1 + len(self.labels) if self.type == "category" else 1

    def encoded(self, values: Floats) -> Floats:
        """Return what a model reads or learns of these values, as `placed` gives them; NaN: there is none."""
        if self.fill is not None:
            values = np.where(np.isnan(values), self.fill, values)
        if self.outlier_fill is not None:
            values = np.where(self.is_outlier(values), self.outlier_fill, values)
        return self.scale.normalised(values) if self.type == "number" else values

    def is_outlier(self, values: Floats) -> npt.NDArray[np.bool_]:
        """Return which values are too far from the training split's mean."""
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return (values < low) | (values > high)

    def as_output(self) -> Output:
        """Return what prediction needs."""
        return Output(
            name=self.name,
            type=self.type,
            labels=self.labels,
            mean=self.mean,
            deviation=self.deviation,
            scale=self.scale,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """Hold what was learned of all columns but texts, in the order of the features."""

    inputs: tuple[TableColumn, ...]
    outputs: tuple[TableColumn, ...]
    num_texts: int

    def save(self, path: Path) -> None:
        """Write the columns as a JSON file, whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> TableColumns:
        """Return what was saved. Raises DataError for a damaged file."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            inputs, outputs = (tuple(map(_column_of, saved[each])) for each in ("inputs", "outputs"))
            return cls(inputs=inputs, outputs=outputs, num_texts=saved["num_texts"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                what=f"the statistics of the table's columns cannot be read: {error}",
                where=str(path),
                expected="the file as the training run wrote it",
                fix="copy it from the run again, or train again",
            ) from None


def _column_of(saved: dict[str, Any]) -> TableColumn:
    return TableColumn(**{**saved, "labels": tuple(saved["labels"]), "scale": Scale(**saved["scale"])})


def labels_of(feature: Feature, texts: Sequence[str], values: Floats, training: npt.NDArray[np.bool_]) -> list[str]:
    """Return the labels of a category or binary column, in the order of their positions.

    texts: of the column. values: [rows], which of them stands in each row, NaN for none. training: [rows], of the
    training split, whose counts decide. An output has all labels of all rows, an input those of the training split.
    """
    here = np.bincount(values[training & ~np.isnan(values)].astype(np.int64), minlength=len(texts))
    if feature.type == "binary":
        return _truth_labels(feature, texts, here)
    everywhere = np.bincount(values[~np.isnan(values)].astype(np.int64), minlength=len(texts))
    found = np.flatnonzero(everywhere if feature.is_output else here).tolist()
    ordered = [texts[each] for each in sorted(found, key=lambda each: (-here[each], texts[each]))]
    return ordered if feature.is_output else ordered[: feature.most_common]


def _truth_labels(feature: Feature, texts: Sequence[str], counts: npt.NDArray[np.int64]) -> list[str]:
    """Return the labels of false and true: these words where most values are truth values, else the column's own.

    Of these `fallback_true_label` is true, or, as in Ludwig, the first in the alphabet, and the most frequent other
    one is false.
    """
    num_words = sum(count for text, count in zip(texts, counts.tolist(), strict=True) if text.lower() in _WORDS)
    if num_words * 2 >= counts.sum():
        return list(TRUTH_VALUES)
    if feature.fallback_true_label is not None and feature.fallback_true_label not in texts:
        raise DataError(
            what=f"no row of column `{feature.column}` holds {feature.fallback_true_label!r}",
            where=f"{feature.place}.preprocessing.fallback_true_label",
            expected=_listed(texts),
        )
    by_count = [texts[each] for each in np.argsort(-counts, kind="stable") if counts[each]]
    true = feature.fallback_true_label or min(by_count[:2])
    return [next((text for text in by_count if text != true), UNKNOWN), true]


def positions(column: TableColumn, texts: Sequence[str]) -> Floats:
    """Return which label each of these texts is, by its position, and NaN behind them, for a missing one.

    One that is no label is a position before the first: 0 of a category input, where that means unknown, else -1.
    """
    if column.type == "binary" and column.labels == TRUTH_VALUES:
        found = [_WORDS.get(text.lower(), -1) for text in texts]
    else:
        known = {label: place for place, label in enumerate(column.labels, column.first)}
        found = [known.get(text, column.first - 1) for text in texts]
    return np.array([*found, np.nan], dtype=np.float64)


def placed(values: Floats, places: Floats) -> Floats:
    """Return for each text's number [rows] what `positions` says of it."""
    return places[np.where(np.isnan(values), len(places) - 1, values).astype(np.int64)]


def unknown_label(feature: Feature, labels: Sequence[str], text: str) -> Problem:
    """Return the problem of a row whose value is none of the labels."""
    meant = misspelt(text, labels)
    is_truth = feature.type == "binary" and tuple(labels) == TRUTH_VALUES
    return Problem(
        what=f"column `{feature.column}` holds {shortened(text)!r}, which is "
        + ("no truth value" if is_truth else "a label that was never seen" if feature.type == "category" else "neither")
        + (f" (did you mean {meant}?)" if meant else ""),
        expected="true or false, yes or no, 1 or 0" if is_truth else _listed(labels),
        fix=f"correct the cell, or set {feature.place}.type: category" if is_truth else "correct the cell",
    )


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(map(repr, labels[:10])) + (f" or {len(labels) - 10:,} more" if len(labels) > 10 else "")


def unfilled(feature: Feature, labels: Sequence[str]) -> TableColumn:
    """Return a column of which nothing but the labels is known."""
    assert feature.type != "text", "a text has tokens"
    return TableColumn(
        name=feature.name,
        type=feature.type,
        is_output=feature.is_output,
        labels=tuple(labels),
        encoder=feature.encoder,
    )


def bounded(feature: Feature, column: TableColumn, values: Floats) -> TableColumn:
    """Return the column with the numbers beyond which a value is an outlier, if the feature asks for that.

    values: [training rows].
    """
    seen = values[~np.isnan(values)]
    if feature.outlier_strategy is None or not len(seen):
        return column
    mean, reach = float(seen.mean()), feature.outlier_threshold * float(seen.std())
    return replace(column, low=mean - reach, high=mean + reach)


def learned(feature: Feature, column: TableColumn, values: Floats, source: Source) -> TableColumn:
    """Return the column with what is learned from its values in the training split.

    values: [training rows], as `placed` gives them, NaN for none. Outliers, where the column has bounds, do not count.
    Raises DataError: no value at all; an output of one label, or of too many; class weights of labels that are none.
    """
    seen = values[~np.isnan(values)]
    if not len(seen):
        raise DataError(
            what=f"column `{feature.column}` has no value in the training split",
            where=source.name,
            expected="some rows with a value",
            fix=f"fill the column, or remove {feature.place}",
        )
    if feature.type != "number":
        if feature.is_output:
            _require_classes(feature, column, seen, source)
        return replace(column, fill=_fill(feature, feature.missing_value_strategy, seen, column))
    inner = seen[~column.is_outlier(seen)]
    seen = inner if len(inner) else seen  # below one deviation, no value may be within
    return replace(
        column,
        mean=float(seen.mean()),
        deviation=float(seen.std()),
        scale=Scale.of(seen, feature.normalization),
        fill=_fill(feature, feature.missing_value_strategy, seen, column),
        outlier_fill=_fill(feature, feature.outlier_strategy, seen, column),
    )


def _fill(feature: Feature, strategy: Strategy | None, seen: Floats, column: TableColumn) -> float | None:
    """Return what stands in place of a missing value or an outlier; None where nothing does."""
    if strategy in ("fill_with_false", "fill_with_true"):
        return float(strategy == "fill_with_true")
    if strategy == "fill_with_mean":
        return float(seen.mean())
    if strategy == "fill_with_mode":
        labelled = seen[seen >= column.first] if column.type == "category" else seen  # unknown ones are many labels
        values, counts = np.unique(labelled, return_counts=True)
        return float(values[counts.argmax()])
    if strategy != "fill_with_const":
        return None
    if feature.type == "number":
        return float(feature.fill_value or 0)
    return _label_fill(feature, column)


def _label_fill(feature: Feature, column: TableColumn) -> float:
    """Return the position of the label that fills missing cells; 0 where a category input does not know it."""
    text = str(feature.fill_value)
    if column.type == "binary" and column.labels == TRUTH_VALUES and text.lower() in _WORDS:
        return float(_WORDS[text.lower()])
    if text in column.labels:
        return float(column.labels.index(text) + column.first)
    if column.first:
        return 0.0
    raise DataError(
        what=f"missing cells are to become {text!r}, which is no label of column `{feature.column}`",
        where=f"{feature.place}.preprocessing.fill_value",
        expected=_listed(column.labels),
        fix="name one of these, or another missing_value_strategy",
    )


def _require_classes(feature: Feature, column: TableColumn, seen: Floats, source: Source) -> None:
    """Raise DataError for an output of one label, of too many, or with weights of labels that it does not have."""
    labels = column.labels
    counts = np.bincount(seen.astype(np.int64), minlength=len(labels)).tolist()
    fix = f"look at column `{feature.column}`, or at preprocessing.split"
    if feature.type == "category":
        by_label = Counter(dict(zip(labels, counts, strict=True)))
        require_labels(by_label, feature.column, source, most=MOST_LABELS, fix=fix, key=f"{feature.place}.type")
    if sum(count > 0 for count in counts) < 2:
        raise DataError(
            what=f"column `{feature.column}` holds {labels[int(seen[0])]!r} alone in the training split",
            where=source.name,
            expected="at least two labels, since there is nothing to learn from one",
            fix=fix,
        )
    DataError.raise_for(
        Problem(
            what=f"the class weight of {label!r} is of no label of column `{feature.column}`",
            where=f"{feature.place}.loss.class_weights",
            expected=_listed(labels),
        )
        for label in feature.class_weights
        if label not in labels
    )


def column_notes(feature: Feature, column: TableColumn, *, num_unknown: int, num_taught: int) -> list[str]:
    """Return what to know of a column that is learned: choices that nobody asked for, and what says nothing.

    num_unknown: rows of a category input whose label is none of its labels. num_taught: labels of the training split.
    """
    notes: list[str] = []
    if column.type == "binary" and column.labels != TRUTH_VALUES and feature.fallback_true_label is None:
        false, true = column.labels
        note = (
            f"column `{feature.column}` holds no truth values: {true!r} counts as true, the first in the alphabet, "
            f"and {false!r} as false; {feature.place}.preprocessing.fallback_true_label names another"
        )
        notes.append(warning(note, topic="rows", short=f"column `{feature.column}`: {true!r} counts as true"))
    if num_unknown:
        rows = format_count(num_unknown, "row has", "rows have")
        known = format_count(len(column.labels), "known label")
        notes.append(f"column `{feature.column}`: {rows} none of the {known}: {UNKNOWN}")
    if column.type == "category" and num_taught < len(column.labels):
        labels = format_count(len(column.labels) - num_taught, "label has", "labels have")
        what = f"column `{feature.column}`: {labels} no row in the training split, and cannot be learned"
        notes.append(warning(f"{what}: {_listed(column.labels[num_taught:])}", topic="rows", short=what))
    if column.type != "binary" and (num_taught == 1 if column.type == "category" else column.deviation == 0):
        what = f"column `{feature.column}` has one value in the training split, from which nothing can be learned"
        notes.append(warning(what, topic="rows"))
    return notes
