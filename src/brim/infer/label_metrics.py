"""How often a category's label is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from brim.infer.bootstrap import Floats, Measure


def label_measures(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Measure]:
    """Accuracy, and F1 as the mean over the labels that are there, in either, whatever their number of rows."""
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
