"""Accuracy and macro F1 against values worked out by hand and a second implementation."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.infer import label_measures

LABELS = st.sampled_from(["yes", "no", "maybe"])


def by_hand(pairs):
    """Macro F1 over the labels that occur, from precision and recall of each."""
    found = []
    for label in {label for pair in pairs for label in pair}:
        right = sum(pair == (label, label) for pair in pairs)
        predicted, wanted = (sum(pair[side] == label for pair in pairs) for side in (0, 1))
        precision, recall = right / max(predicted, 1), right / max(wanted, 1)
        found.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return sum(found) / len(found)


def test_three_of_four():
    # yes: 2 of 2 found, 3 named: F1 4/5. no: 1 of 2 found, 1 named: F1 2/3.
    measures = label_measures(["yes", "yes", "no", "yes"], ["yes", "yes", "no", "no"])
    assert measures["category_accuracy"].value == 0.75
    assert measures["macro_f1"].value == pytest.approx((4 / 5 + 2 / 3) / 2)


@given(pairs=st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=30), seed=st.integers(0, 9))
def test_figures_of_all_rows_and_of_drawn_ones_are_those_of_a_second_implementation(pairs, seed):
    measures = label_measures(*map(list, zip(*pairs, strict=True)))
    assert measures["macro_f1"].value == pytest.approx(by_hand(pairs))
    assert measures["category_accuracy"].value == pytest.approx(np.mean([a == b for a, b in pairs]))
    drawn = np.random.default_rng(seed).integers(0, len(pairs), len(pairs))
    counts = np.bincount(drawn, minlength=len(pairs)).astype(float)[None]
    again = [pairs[number] for number in drawn]
    assert measures["macro_f1"].of(counts)[0] == pytest.approx(by_hand(again))
    assert measures["category_accuracy"].of(counts)[0] == pytest.approx(np.mean([a == b for a, b in again]))
