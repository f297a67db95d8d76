"""Labels of responses beside those of the data."""

from __future__ import annotations

import numpy as np

from brim.config.labels import LabelReader
from brim.config.schema import OutputFeature
from brim.infer.category_pairs import category_pairs


def test_pairs_and_how_often_each_occurs():
    match = {label: {"type": "contains", "value": label} for label in ("good", "bad")}
    feature = {
        "name": "a",
        "type": "category",
        "preprocessing": {"fallback_label": "none", "vocab": ["bad", "good", "mixed"]},
        "decoder": {"match": match},
    }
    reader = LabelReader(OutputFeature.model_validate(feature))
    pairs = category_pairs(
        ["good", " Bad.", "so-so", "none", "bad"], ["good", " bad ", "mixed", "none", "good"], reader
    )
    assert pairs.labels == ("bad", "good", "mixed", "none")
    assert pairs.predicted.tolist() == [1, 0, 3, 3, 0]
    assert pairs.expected.tolist() == [1, 0, 2, 3, 1]
    assert pairs.is_fallback.tolist() == [False, False, True, True, False]
    expected = np.zeros((4, 4), dtype=int)
    for truth, found in zip(pairs.expected, pairs.predicted, strict=True):
        expected[truth, found] += 1
    assert (pairs.confusion == expected).all()


def test_no_rows_are_no_pairs():
    rules = {"good": {"type": "contains", "value": "good"}}
    feature = {"name": "a", "type": "category", "preprocessing": {"fallback_label": "n"}, "decoder": {"match": rules}}
    assert category_pairs([], [], LabelReader(OutputFeature.model_validate(feature))).confusion.sum() == 0
