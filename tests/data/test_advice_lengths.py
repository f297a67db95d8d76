"""What limits cut, which length would keep how much, and how lengths are spread."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from brim.data import check_data
from brim.data.advice import Bin, Cut, histogram
from brim.data.read import read

ALL_TRAIN = {"type": "random", "probabilities": [1.0, 0.0, 0.0]}


@pytest.fixture
def source():
    """100 rows: prompts of 2 to 101 tokens (with <s>), answers of 8 with 92 of 100 and of 30 to 100 with the others."""
    answers = [f"{n:08}" if n < 92 else "y" * 10 * (n - 89) for n in range(100)]
    return read({"q": ["x" * (n + 1) for n in range(100)], "a": answers})


def check(source, encoder, make_config, context_length=None, **changes):
    config = make_config(preprocessing__split=ALL_TRAIN, **changes)
    return check_data(config, source, encoder, context_length=context_length)


def found(report, kind):
    return next(finding for finding in report.advice if finding.kind == kind)


def test_rows_cut_as_a_whole_have_no_end(source, encoder, make_config):
    report = check(source, encoder, make_config, context_length=512, preprocessing__global_max_sequence_length=105)
    totals = np.array([n + 2 + (8 if n < 92 else 10 * (n - 89)) + 1 for n in range(100)])
    lost = int((totals - 105).clip(min=0).sum())
    (cut,) = report.cuts
    assert cut == Cut(
        event="cut_joined",
        limit_tokens=105,
        why="preprocessing.global_max_sequence_length is 105",
        num_rows=8,
        num_all_rows=100,
        num_tokens_lost=lost,
        share_of_tokens_lost=lost / int(totals.sum()),
        keeps_95=147,
        keeps_99=191,
        keeps_all=202,
    )
    assert [int((totals <= length).sum()) for length in (146, 147, 190, 191, 201, 202)] == [94, 95, 98, 99, 99, 100]
    finding = found(report, "no_end")
    assert (
        finding.what
        == f"8 of 100 rows (8.0%) are cut at 105 tokens; {lost / totals.sum():.1%} of their tokens are lost"
    )
    assert finding.fix == (
        "set preprocessing.global_max_sequence_length: 191 (whole are 95% at 147, 99% at 191, all at 202)"
    )
    assert finding.why == "they have no end-of-sequence token: the model does not learn there when to stop"
    assert finding.rows.tolist() == list(range(92, 100))
    assert report.other_events == ()
    assert report.events[0].startswith("8 of 100 rows were cut as a whole")


def test_the_context_bounds_what_is_recommended(source, encoder, make_config):
    def fix(context_length):
        changes = {"preprocessing__global_max_sequence_length": 105}
        return found(check(source, encoder, make_config, context_length=context_length, **changes), "no_end").fix

    assert fix(150).startswith("set preprocessing.global_max_sequence_length: 150 (whole are")
    assert fix(105) == (
        "shorten these rows, or take them out: the model's context ends there "
        "(whole are 95% at 147, 99% at 191, all at 202)"
    )


def test_prompts_and_answers_cut_alone(source, encoder, make_config):
    report = check(
        source,
        encoder,
        make_config,
        input__preprocessing__max_sequence_length=99,
        output__preprocessing__max_sequence_length=20,
    )
    prompt, answer = report.cuts
    assert (prompt.event, prompt.num_rows, prompt.num_tokens_lost, prompt.keeps_all) == ("cut_prompt", 2, 3, 101)
    assert (answer.event, answer.num_rows, answer.keeps_95, answer.keeps_all) == ("cut_answer", 8, 50, 100)
    assert answer.num_tokens_lost == sum(10 * n - 20 for n in range(3, 11))
    assert found(report, "cut_prompt").fix.startswith("set input_features[0].preprocessing.max_sequence_length: 100 (")
    assert found(report, "cut_answer").fix.startswith("set output_features[0].preprocessing.max_sequence_length: 90 (")
    assert found(report, "cut_answer").rows.tolist() == list(range(92, 100))


def test_rows_that_were_dropped_count_with_the_length_that_they_had(source, encoder, make_config):
    settings = {"preprocessing__global_max_sequence_length": 50, "preprocessing__drop_unlearnable": True}
    report = check(source, encoder, make_config, **settings)
    assert report.splits[0].num_rows < 100
    assert (report.cuts[0].num_all_rows, report.cuts[0].keeps_all) == (100, 202)
    assert sum(each.num_rows for each in report.lengths) == 100
    assert report.other_events[0].startswith("52 of 100 rows were dropped: nothing of the answer is left")


def test_no_limit_no_cut(source, encoder, make_config):
    report = check(source, encoder, make_config, context_length=512)
    assert report.cuts == ()
    assert report.advice == ()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([7, 7, 7], [(7, 7, 3)]),
        ([10, 11, 11, 13], [(10, 10, 1), (11, 11, 2), (12, 12, 0), (13, 13, 1)]),
        ([100, 140, 260], [(100, 149, 2), (150, 199, 0), (200, 249, 0), (250, 260, 1)]),
        ([3, 9, 70, 130], [(3, 4, 1), (5, 8, 0), (9, 16, 1), (17, 32, 0), (33, 64, 0), (65, 128, 1), (129, 130, 1)]),
    ],
)
def test_bins(lengths, expected):
    bins = histogram(np.asarray(lengths, dtype=np.int64))
    assert bins == tuple(Bin(first=first, last=last, num_rows=rows) for first, last, rows in expected)


@given(lengths=st.lists(st.integers(0, 100_000), min_size=1, max_size=50))
def test_bins_hold_every_length_once_and_leave_no_gap(lengths):
    bins = histogram(np.asarray(lengths, dtype=np.int64))
    assert len(bins) <= 8
    assert bins[0].first <= min(lengths)
    assert bins[-1].last == max(lengths)
    assert all(after.first == before.last + 1 for before, after in pairwise(bins))
    assert [each.num_rows for each in bins] == [sum(b.first <= n <= b.last for n in lengths) for b in bins]


# Data to predict


def test_data_without_answers_and_splits_is_checked_by_its_prompts(encoder, make_config):
    config = make_config(trainer={"type": "none"}, adapter=None, preprocessing__split="fixed")
    prompts = [f"Summarize dialogue {n}: {'hello ' * n}" for n in range(20)]
    report = check_data(config, read({"q": prompts}), encoder, context_length=1024)
    assert [(split.name, split.num_rows) for split in report.splits] == [("full", 20)]
    assert report.splits[0].answer is None
    assert report.splits[0].prompt == report.splits[0].total
    assert report.notes[0] == "the data has no column `a`: the prompts alone were checked, as for predict"


def test_prompts_without_room_for_the_answer(encoder, make_config):
    config = make_config(trainer={"type": "none"}, adapter=None, generation__max_new_tokens=40)
    prompts = ["x" * n for n in (10, 80, 59, 60, 70)]
    (finding,) = check_data(config, read({"q": prompts}), encoder, context_length=100).advice
    assert finding.kind == "no_room"
    assert finding.what == (
        "3 of 5 prompts (60.0%) are too long: the model's context of 100 tokens less generation.max_new_tokens 40 "
        "leaves 60, the longest has 81"
    )
    assert finding.rows.tolist() == [1, 4, 3]
    assert finding.fix == (
        "lower generation.max_new_tokens, or set input_features[0].preprocessing.max_sequence_length: 60"
    )


def test_answers_without_a_split_are_checked_as_a_whole(encoder, make_config):
    config = make_config(trainer={"type": "none"}, adapter=None, preprocessing__split="fixed")
    columns = {"q": [f"What is {n}?" for n in range(20)] * 2, "a": [f"{n} it is." for n in range(40)]}
    report = check_data(config, read(columns), encoder, context_length=1024)
    assert [(split.name, split.num_rows) for split in report.splits] == [("full", 40)]
    assert report.notes[0] == "the data has no column `split`: it was checked as a whole, without splits"
    assert [finding.kind for finding in report.advice] == ["different_answers"]


def test_where_something_is_trained_the_columns_have_to_be_there(encoder, make_config):
    from brim.errors import DataError

    with pytest.raises(DataError, match="no column `a`, which output_features"):
        check_data(make_config(), read({"q": ["a"]}), encoder, context_length=None)
