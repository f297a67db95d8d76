"""Compare the model's texts with references: labels by accuracy and F1, other texts by BLEU, ROUGE and exact match.

For a category, labels are read from the texts first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brim.config.prompts import MAX_STEPS, LabelReader
from brim.config.schema import Config, OutputFeature
from brim.infer.metrics.statistics import Floats, Measure


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
