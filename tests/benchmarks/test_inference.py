"""The figures of the inference benchmark, from outcomes that are written down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.inference_begun import begun_by_process
from benchmarks.inference_limited import largest_that_fits
from benchmarks.inference_rows import Peak, summary
from benchmarks.inference_run import Answer, Outcome, Spec
from benchmarks.inference_speed import best, contenders, hand_search, race, summarize
from hypothesis import given, strategies as st

SPEC = Spec(folder="nowhere", contender="brim", num_threads=1, num_rows=2)
SAME = [Answer(text="a", num_tokens=1, has_stopped=True), Answer(text="b", num_tokens=2, has_stopped=False)]


def outcome(generate_s, answers=SAME):
    return Outcome(generate_s=generate_s, whole_s=generate_s + 1, answers=answers, peak_bytes=7)


def test_the_hand_search_takes_the_fastest_size_of_each_way():
    def start(spec):
        assert spec.batch_rows is not None
        return outcome(abs(spec.batch_rows - 4) + {"static": 2.0, "by_length": 1.0, "continuous": 3.0}[spec.contender])

    trials = hand_search(SPEC, num_rows=2, batches=(1, 2, 4, 8), say=lambda line: None, start=start)
    assert len(trials) == 11, "rows alone have no order"
    assert best(trials, "static") == best(trials, "by_length") == 4
    specs = contenders(SPEC, trials)
    rows = {"brim": None, "static": 4, "by_length": 4, "continuous": 4, "row by row": 1}
    assert {name: spec.batch_rows for name, spec in specs.items()} == rows
    assert [spec.contender for spec in specs.values()] == ["brim", "static", "by_length", "continuous", "static"]
    # A way that fails is not raced, and every other round goes backwards.
    failed = contenders(SPEC, hand_search(SPEC, num_rows=2, batches=(), say=lambda line: None))
    ran = []
    outcomes = race(
        failed, rounds=2, say=lambda line: None, start=lambda spec: ran.append(spec.contender) or outcome(1.0)
    )
    assert (ran, [len(each) for each in outcomes.values()]) == (["brim", "static", "brim"], [2, 1])


def test_contenders_are_compared_with_brim_in_the_same_round():
    other = [SAME[0], Answer(text="c", num_tokens=2, has_stopped=False)]
    specs = {"brim": SPEC, "static": SPEC}
    outcomes = {
        "brim": [outcome(1.0), outcome(2.0), outcome(4.0)],
        "static": [outcome(3.0, other), outcome(4.0), outcome(6.0)],
    }
    ours, theirs = summarize(specs, outcomes)
    assert (ours.brim_is_faster, ours.rows_equal, ours.goal) == (1.0, 2, None)
    assert (theirs.brim_is_faster, theirs.rows_per_s, theirs.rows_equal, theirs.rows_cut) == (2.0, 0.5, 1, 1)
    assert theirs.brim_is_faster_in_all == pytest.approx(5 / 3, abs=1e-3)
    assert theirs.is_met


@given(st.integers(0, 60), st.integers(1, 60))
def test_the_largest_that_fits_is_found_from_any_guess(largest, guess):
    assert largest_that_fits(lambda rows: rows <= largest, guess) == largest


def test_rows_that_a_process_begins_again_are_counted_and_growth_is_told_by_the_row(tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("11 0\n11 1\n11 2\n12 1\n12 3\n13 3\n13 4\n")
    begun = begun_by_process(notes)
    assert [each.rows for each in begun] == [(0, 1, 2), (1, 3), (3, 4)]
    assert [each.num_repeated for each in begun] == [0, 1, 1]
    few = Peak(num_rows=10, peak_bytes=1000, without_data_bytes=500, input_bytes=5, seconds=1.0)
    told = summary([few, replace(few, num_rows=100, peak_bytes=1090)])
    assert (told["growth"], told["bytes_a_row"]) == (0.09, 1.0)
    assert (told["growth_without_data"], told["bytes_a_row_without_data"]) == (0.0, 0.0)
