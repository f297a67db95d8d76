"""BLEU, ROUGE and exact match against values worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from sacrebleu.metrics import BLEU

from brim.infer import intervals, text_measures
from brim.infer.evaluate import text_metrics

LONG = "the quick brown fox jumps over the lazy dog"


def test_equal_texts_are_perfect():
    assert text_metrics([LONG, "a b c d"], [LONG, "a b c d"]) == pytest.approx(
        {"bleu": 100.0, "rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "exact_match": 1.0}
    )


def test_texts_without_a_common_word_are_worth_nothing():
    figures = text_metrics(["one two three four five"], ["six seven eight nine ten"])
    assert {name: figures[name] for name in ("rouge1", "rouge2", "rougeL", "exact_match")} == {
        "rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0, "exact_match": 0.0,
    }  # fmt: skip
    assert figures["bleu"] < 10  # smoothed


def test_rouge_is_the_mean_of_the_rows_f_measures():
    # Row 1: 2 of 2 words right, of 4 wanted: precision 1, recall 1/2, F 2/3. Row 2: equal.
    figures = text_metrics(["the quick", "a b"], ["the quick brown fox", "a b"])
    assert figures["rouge1"] == pytest.approx((2 / 3 + 1) / 2)
    # Pairs of row 1: 1 of 1 right, of 3 wanted: F 1/2.
    assert figures["rouge2"] == pytest.approx((1 / 2 + 1) / 2)
    assert figures["exact_match"] == 0.5


def test_rouge_l_keeps_the_order():
    # The longest common subsequence of "b a c" and "a b c" has two words.
    assert text_metrics(["b a c"], ["a b c"])["rougeL"] == pytest.approx(2 / 3)
    assert text_metrics(["b a c"], ["a b c"])["rouge1"] == pytest.approx(1.0)


def test_bleu_is_of_the_corpus_with_its_brevity_penalty():
    # All n-grams right, 6 words where 8 are wanted: exp(1 - 8/6).
    assert text_metrics(["a b c d e f"], ["a b c d e f g h"])["bleu"] == pytest.approx(100 * math.exp(1 - 8 / 6))


def test_outer_white_space_is_no_difference_and_inner_is():
    assert text_metrics([" 7\n", "1  2"], ["7", "1 2"])["exact_match"] == 0.5


def test_silence_is_worth_nothing_and_no_error():
    figures = text_metrics(["", ""], ["a b c d", "e"])
    assert set(figures.values()) == {0.0}


def test_the_lists_must_match():
    with pytest.raises(ValueError):
        text_metrics(["a"], ["a", "b"])


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "the", "fox,", "1.5"]), max_size=12).map(" ".join)


@given(pairs=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6))
def test_bleu_is_sacrebleus_of_any_corpus(pairs):
    responses, references = zip(*pairs, strict=True)
    expected = BLEU().corpus_score(list(responses), [list(references)]).score
    assert text_metrics(responses, references)["bleu"] == pytest.approx(expected, abs=1e-9)


def test_the_measures_of_drawn_rows_are_those_of_a_corpus_of_them():
    responses = ["the cat sat on a mat", "a dog ran", "nothing at all here", "the end of it all is near"]
    references = ["the cat sat on the mat", "a dog ran fast", "something else entirely", "the end of it all was near"]
    measures = text_measures(responses, references)
    for drawn in ([0, 0, 1, 3], [2, 2, 2, 2], [1, 2, 3, 3]):
        counts = np.bincount(drawn, minlength=4).astype(float)[None]
        expected = text_metrics([responses[n] for n in drawn], [references[n] for n in drawn])
        assert {name: measure.of(counts)[0] for name, measure in measures.items()} == pytest.approx(expected, abs=1e-9)
    found = intervals(measures, 4)
    assert all(found[name].low <= measure.value <= found[name].high for name, measure in measures.items())
