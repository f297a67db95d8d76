"""The engine of a job: what is measured with, and what follows from it."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.planning.engines import fastest, sample_of, unmeasured


def test_the_sample_is_the_middle_of_the_prompts():
    sample = sample_of([5, 100, 7, 9, 1, 8, 6, 2, 3, 4] * 100, rows=3, num_engines=2, run_s=3600.0)
    tokens = np.array([5, 100, 7, 9, 1, 8, 6, 2, 3, 4] * 100)[list(sample.positions)]
    assert sorted(tokens.tolist()) == [5, 5, 5, 6, 6, 6]
    assert sample.allowed_s == 30.0


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=300),
    rows=st.integers(1, 20),
    num_engines=st.integers(2, 4),
    run_s=st.floats(1.0, 1e5),
)
def test_measuring_takes_no_more_than_its_share(lengths, rows, num_engines, run_s):
    sample = sample_of(lengths, rows=rows, num_engines=num_engines, run_s=run_s)
    if not sample.positions:
        assert sample.reason
        return
    assert len(set(sample.positions)) == len(sample.positions) == 2 * rows
    taken = np.array(lengths)[list(sample.positions)]
    needed_s = num_engines * run_s * taken.sum() / sum(lengths)
    assert needed_s <= sample.allowed_s <= min(0.02 * run_s, 30.0)
    others = np.delete(np.array(lengths), list(sample.positions))
    below, above = (others < taken.min()).sum(), (others > taken.max()).sum()
    within = len(others) - below - above
    assert abs(int(below) - int(above)) <= within + 1  # in the middle, ties aside


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"num_engines": 1}, "no other engine can write these responses"),
        ({"run_s": None}, "it is not known how long the job takes"),
        ({"rows": 51}, "100 rows are fewer than two sets of the 51 that run together"),
        (
            {"rows": 5, "run_s": 600.0},
            "measuring 2 engines takes about 2 min 0 s, more than 12.0 s: 2% of the job, 30.0 s at most",
        ),
    ],
)
def test_why_nothing_is_measured(how, reason):
    given = {"rows": 5, "num_engines": 2, "run_s": 600.0, **how}
    assert sample_of([10] * 100, **given).reason == reason
    assert unmeasured(reason).reason == f"the usual choice, not measured: {reason}"
    assert unmeasured(reason).kind == "slots"


def test_the_fastest_is_taken_and_the_others_are_told():
    choice = fastest({"slots": 4.0, "paged": 2.0, "static": 8.0}, num_rows=16, dropped={"x": "its responses differ"})
    assert choice.kind == "paged"
    assert choice.reason == "rows/s over 16 rows: paged 8, slots 4, static 2; x: its responses differ"
    assert choice.rows_per_s == {"slots": 4.0, "paged": 8.0, "static": 2.0}


def test_a_little_faster_is_noise():
    assert fastest({"slots": 1.04, "static": 1.0}, num_rows=8, dropped={}).kind == "slots"
    assert fastest({"slots": 1.06, "static": 1.0}, num_rows=8, dropped={}).kind == "static"
