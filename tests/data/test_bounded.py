"""Texts beyond what is tokenized."""

from __future__ import annotations

import numpy as np
import pytest

from brim.data.labels import bounded
from brim.data.read import RowFaults
from brim.data.tokens import Texts


def batch(prompts, answers):
    return Texts(keys=np.arange(10, 10 + len(prompts)), prompts=prompts, answers=answers)


@pytest.fixture
def faults():
    return RowFaults(locate=str)


def test_texts_within_the_bound_pass_as_they_are(faults):
    texts = [batch(["a", "bc"], ["d", "e"]), batch(["a"], [])]
    assert [given is passed for given, passed in zip(texts, bounded(texts, faults, most=2), strict=True)] == [
        True,
        True,
    ]
    assert faults.problems == {}


def test_longer_ones_are_faults_of_their_rows(faults):
    texts = [batch(["a", "bcd", "e"], ["f", "g", "hijk"]), batch(["xyz"], [])]
    (passed,) = bounded(texts, faults, most=2)
    assert (passed.keys.tolist(), passed.prompts, passed.answers) == ([10], ["a"], ["f"])
    assert {key: problem.what for key, problem in faults.problems.items()} == {
        11: "a text of 3 characters",
        12: "a text of 4 characters",
        10: "a text of 3 characters",
    }
    assert faults.problems[11].expected == "at most 2 characters"
