"""Rows to measure by that stand in train, too."""

import numpy as np
import pytest

from brim.data import check_data
from brim.data.read import read

WORDS = [f"word{n}" for n in range(100)]


def meanings(words):
    return [f"what {word} means." for word in words]


def asked(words):
    return [f"Define {word}." for word in words]


def test_prompts_and_rows_of_train_in_the_other_splits(advice_on):
    words = WORDS + WORDS[:6] + WORDS[10:13]
    answers = meanings(WORDS) + meanings(WORDS[:4]) + ["another thing.", "and another."] + meanings(WORDS[10:13])
    split = [0] * 60 + [2] * 35 + [1] * 5 + [2] * 6 + [1] * 3
    found = advice_on(asked(words), answers, split=split)
    assert list(found) == ["leakage", "small_split"]
    finding = found["leakage"]
    assert finding.what == (
        "3 of 8 validation rows (37.5%) have a prompt that stands in train (3 with the same answer); "
        "6 of 41 test rows (14.6%) have a prompt that stands in train (4 with the same answer)"
    )
    assert finding.rows.tolist() == [106, 107, 108, 100, 101, 102, 103, 104, 105]
    assert finding.like.tolist() == [10, 11, 12, 0, 1, 2, 3, 4, 5]
    assert finding.fix == (
        "take these rows out (`brim check … --rows FILE` lists them), or set "
        "preprocessing.split: {type: hash, column: q}"
    )


def test_splits_that_share_nothing(advice_on):
    assert advice_on(asked(WORDS), meanings(WORDS), split=[0] * 40 + [1] * 30 + [2] * 30) == {}


def test_answers_alone_may_repeat(advice_on):
    answers = ["yes", "no"] * 50
    assert advice_on(asked(WORDS), answers, split=[0] * 40 + [1] * 30 + [2] * 30) == {}


def test_the_fix_for_a_random_split_ends_the_leak(encoder, make_config):
    columns = {"q": asked(WORDS) * 3, "topic": ["words"] * 300, "a": meanings(WORDS * 3)}
    template = "{topic}: {q}\n"
    config = make_config(prompt__template=template)
    leak = check_data(config, read(columns), encoder, context_length=None).advice[0]
    assert leak.kind == "leakage"
    assert leak.fix == "set preprocessing.split: {type: hash, column: q}"
    mended = make_config(prompt__template=template, preprocessing__split={"type": "hash", "column": "q"})
    kinds = [finding.kind for finding in check_data(mended, read(columns), encoder, context_length=None).advice]
    assert "leakage" not in kinds
    assert "duplicates" in kinds


def test_text_that_is_learned_alone_leaks_where_it_is_the_same(advice_on):
    pieces = meanings(WORDS)
    found = advice_on([""] * 101, [*pieces, pieces[7]], split=[0] * 60 + [2] * 41)
    assert found["leakage"].rows.tolist() == [100]
    assert found["leakage"].like.tolist() == [7]
    assert found["leakage"].fix.endswith("set preprocessing.split: {type: hash, column: a}")


@pytest.mark.parametrize(("num_rows", "is_told"), [(29, True), (30, False), (0, False)])
def test_few_rows_to_measure_by(advice_on, num_rows, is_told):
    prompts, answers = asked(WORDS), meanings(WORDS)
    found = advice_on(prompts, answers, split=[0] * (100 - num_rows) + [2] * num_rows)
    assert ("small_split" in found) == is_told
    if is_told:
        finding = found["small_split"]
        assert finding.what == "few rows to measure by: test has 29"
        assert finding.why == "an accuracy from so few rows is uncertain by up to ±18%"
        assert finding.rows.tolist() == []
        assert np.isclose(1.96 * np.sqrt(0.25 / 29), 0.18, atol=0.005)
