"""Compare the model's texts with references, and compute 95% confidence intervals.

Labels are compared by accuracy and F1, other texts by BLEU, ROUGE and exact match; for a category, labels are read from
the texts first. Means of a few repetitions get intervals by Student's t. Metrics of rows get intervals by drawing rows
with replacement (percentile bootstrap, Efron 1979).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.config.prompts import MAX_STEPS, LabelReader
from brim.config.schema import Config, OutputFeature


def label_measures(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Measure]:
    """Return accuracy, and F1 as the mean over the labels that occur on either side, whatever their number of rows."""
    names = sorted({*predictions, *references})
    number = {name: position for position, name in enumerate(names)}
    predicted = np.array([number[name] for name in predictions], dtype=np.int64)
    wanted = np.array([number[name] for name in references], dtype=np.int64)
    # Rows with the same two labels are alike, so that few pairs stand for all rows.
    pairs, pair_of_row = np.unique(wanted * len(names) + predicted, return_inverse=True)
    pairs_wanted, pairs_predicted = np.divmod(pairs, len(names))
    is_right = (pairs_wanted == pairs_predicted).astype(np.float64)
    is_wanted, is_predicted = np.eye(len(names))[pairs_wanted], np.eye(len(names))[pairs_predicted]

    def pair_counts(counts: Floats) -> Floats:
        return np.stack([np.bincount(pair_of_row, weights=each, minlength=len(pairs)) for each in counts])

    def accuracy(counts: Floats) -> Floats:
        return np.asarray(pair_counts(counts) @ is_right / counts.sum(axis=1))

    def macro_f1(counts: Floats) -> Floats:
        by_pair = pair_counts(counts)
        right = (by_pair * is_right) @ is_wanted
        # 2 TP / (2 TP + FP + FN): what was wanted and what was predicted, together.
        there = by_pair @ is_wanted + by_pair @ is_predicted
        with np.errstate(invalid="ignore"):
            f1 = np.where(there > 0, 2 * right / there, 0.0)
        return np.asarray(f1.sum(axis=1) / (there > 0).sum(axis=1))

    once = np.ones((1, len(predicted)))
    return {
        "category_accuracy": Measure(value=float(accuracy(once)[0]), of=accuracy),
        "macro_f1": Measure(value=float(macro_f1(once)[0]), of=macro_f1),
    }


_CONSTRAIN = "output_features.0.decoder.constrain_to_vocabulary"


@dataclass(slots=True, kw_only=True)
class LabelCounts:
    """Count labels, and the texts that named none."""

    labels: Counter[str] = field(default_factory=Counter)
    num_fallback: int = 0  # texts in which no rule finds a label
    num_partial: int = 0  # texts of which a regular expression saw only the beginning, and no rule before it fits

    def extract(self, texts: Sequence[str], reader: LabelReader) -> list[str]:
        """Return the label of each text, which depends on the text alone, and count them."""
        labels = []
        for text in texts:
            reading = reader.read(text)
            self.labels[reading.label] += 1
            self.num_fallback += reading.is_fallback
            self.num_partial += reading.is_partial
            labels.append(reading.label)
        return labels

    def record(self) -> dict[str, Any]:
        """Return the counts for a summary, the most frequent label first."""
        return {
            "labels": dict(self.labels.most_common()),
            "num_fallback": self.num_fallback,
            "num_looked_at_in_part": self.num_partial,
        }

    def notes(self, feature: OutputFeature) -> list[str]:
        """Return notes for people on the labels; where responses name none, with the setting that leads to one."""
        num_texts = self.labels.total()
        decoder = feature.categories
        notes = []
        if self.num_fallback:
            note = f"{self.num_fallback:,} of {num_texts:,} responses name no label and got the fallback label"
            if decoder is None or not decoder.constrain_to_vocabulary:
                note += f"; with {_CONSTRAIN}=true the model can write nothing but labels"
            notes.append(note)
        if self.num_partial:
            notes.append(
                f"{self.num_partial:,} of {num_texts:,} responses are so long that a regular expression could take "
                f"over {MAX_STEPS:,} steps; only their beginning was searched"
            )
        return notes


def label_reader(config: Config) -> LabelReader | None:
    """Return what finds labels in the model's texts; None where these are the answers themselves."""
    is_category = config.chat is None and config.output_features[0].categories is not None
    return LabelReader(config.output_features[0]) if is_category else None


_ROUGE = ("rouge1", "rouge2", "rougeL")


_ORDERS = 4  # of BLEU's n-grams


def text_measures(responses: Sequence[str], references: Sequence[str]) -> dict[str, Measure]:
    """Return corpus BLEU (sacrebleu, 0 to 100), mean ROUGE-1, -2 and -L F-measures (rouge-score, 0 to 1), exact match.

    responses, references: texts in the same order. Both are compared with outer white space taken off.
    """
    from rouge_score.rouge_scorer import RougeScorer

    responses, references = [text.strip() for text in responses], [text.strip() for text in references]
    scorer = RougeScorer(list(_ROUGE))
    rouge = [scorer.score(reference, response) for reference, response in zip(references, responses, strict=True)]
    return {
        "bleu": _bleu(_bleu_counts(responses, references)),
        **{name: Measure.ratio(np.array([scores[name].fmeasure for scores in rouge])) for name in _ROUGE},
        "exact_match": exact_match(responses, references),
    }


def exact_match(responses: Sequence[str], references: Sequence[str]) -> Measure:
    """Return the share of texts that are equal but for outer white space."""
    pairs = zip(responses, references, strict=True)
    return Measure.ratio(np.array([response.strip() == reference.strip() for response, reference in pairs]))


def _bleu_counts(responses: Sequence[str], references: Sequence[str]) -> Floats:
    """Return [N, 10]: right n-grams and all n-grams of each row, of four orders; words; words of the reference."""
    from sacrebleu.metrics import BLEU

    bleu = BLEU()
    found = [
        bleu.corpus_score([response], [[reference]]) for response, reference in zip(responses, references, strict=True)
    ]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in found], dtype=np.float64)


def _bleu(counts: Floats) -> Measure:
    def of(rows: Floats) -> Floats:
        return _bleu_of_sums(rows @ counts)

    return Measure(value=float(_bleu_of_sums(counts.sum(axis=0)[None])[0]), of=of)


def _bleu_of_sums(sums: Floats) -> Floats:
    """Return [B] of [B, 10], as sacrebleu does: orders without a hit count as 1/2, 1/4, … of a hit (Lin, Och 2004).

    Without a hit of any order, and where no text has so many words that there is an n-gram of an order, it is 0.
    """
    right, there = sums[:, :_ORDERS], sums[:, _ORDERS : 2 * _ORDERS]
    words, wanted = sums[:, -2], sums[:, -1]
    halvings = np.cumsum(right == 0, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        precisions = np.where(right == 0, 0.5**halvings, right) / there
        penalty = np.exp(np.minimum(1 - wanted / words, 0))
        scores = 100 * penalty * np.exp(np.log(precisions).mean(axis=1))
    return np.where(right.any(axis=1) & there.all(axis=1), scores, 0.0)


_COVERED = 0.95


_HALVINGS = 100  # of a right angle: down to the last bit of a float


@lru_cache(maxsize=64)
def t_quantile(degrees: int) -> float:
    """Return the t that |T| exceeds in 5% of all cases, for this many degrees of freedom, at least 1."""
    assert degrees > 0, "one value has no scatter"
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _probability_within(middle, degrees) < _COVERED:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _probability_within(angle: float, degrees: int) -> float:
    """Return P(|T| < √degrees · tan(angle)), by finite sums (Abramowitz, Stegun: 26.7.3 for odd, 26.7.4 for even)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for number in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (number - 1) / number
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


_NUM_RESAMPLES = 2000


_DRAWS_AT_ONCE = 2_000_000  # rows; bounds the memory on large data


Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Hold a 95% confidence interval."""

    low: float
    high: float

    @classmethod
    def of_mean(cls, values: Sequence[float]) -> Interval | None:
        """Return mean ± t · s / √n, for normal values; None for fewer than two, or where one is not finite."""
        number = len(values)
        if number < 2 or not all(map(math.isfinite, values)):
            return None
        mean = math.fsum(values) / number
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1))
        half = t_quantile(number - 1) * deviation / math.sqrt(number)
        return cls(low=mean - half, high=mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Hold a figure of rows, and a function that computes it for rows that are drawn from them."""

    value: float
    of: Callable[[Floats], Floats]  # [B, N], how many times each row was drawn -> [B]

    @classmethod
    def ratio(cls, numerator: NDArray[np.generic], denominator: NDArray[np.generic] | None = None) -> Measure:
        """Divide the sum of the one by that of the other, [N] each; None: by the number of rows, which gives a mean."""
        above = np.asarray(numerator, dtype=np.float64)
        below = np.ones(len(above)) if denominator is None else np.asarray(denominator, dtype=np.float64)

        def of(counts: Floats) -> Floats:
            with np.errstate(divide="ignore", invalid="ignore"):  # no token in the rows that were drawn, or NaN
                return np.asarray((counts @ above) / (counts @ below))

        return cls(value=float(above.sum() / below.sum()), of=of)


def intervals(measures: Mapping[str, Measure], num_rows: int, *, seed: int = 0) -> dict[str, Interval]:
    """Return the interval of each measure; all use the same draws of rows."""
    drawn = _resampled(list(measures.values()), num_rows, seed)
    return {name: _interval(values) for name, values in zip(measures, drawn, strict=True)}


def paired_intervals(
    ours: Mapping[str, Measure], theirs: Mapping[str, Measure], num_rows: int, *, seed: int = 0
) -> dict[str, Interval]:
    """Return intervals of the differences ours - theirs of measures that both have, on the same rows in the same order.

    Both use the same draws, so that what makes a row hard for either model cancels.
    """
    names = [name for name in ours if name in theirs]
    drawn = _resampled([each[name] for each in (ours, theirs) for name in names], num_rows, seed)
    with np.errstate(invalid="ignore"):
        differences = drawn[: len(names)] - drawn[len(names) :]
    return {name: _interval(values) for name, values in zip(names, differences, strict=True)}


def _resampled(measures: Sequence[Measure], num_rows: int, seed: int) -> Floats:
    """Return [measures, resamples]. The draws do not depend on how many are made at once."""
    generator = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // num_rows)
    parts = []
    for done in range(0, _NUM_RESAMPLES, at_once):
        number = min(at_once, _NUM_RESAMPLES - done)
        drawn = generator.integers(0, num_rows, size=(number, num_rows))
        drawn += num_rows * np.arange(number)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=number * num_rows).reshape(number, num_rows).astype(np.float64)
        parts.append(np.stack([measure.of(counts) for measure in measures]))
    return np.concatenate(parts, axis=1)


def _interval(values: Floats) -> Interval:
    # Between infinities, interpolation would give NaN.
    low, high = np.quantile(values, [0.025, 0.975], method="nearest" if np.isinf(values).any() else "linear")
    return Interval(low=float(low), high=float(high))
