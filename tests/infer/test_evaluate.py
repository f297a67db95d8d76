"""Scores of rows against each row alone, figures against values worked out by hand, and the divergence of two models."""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from sacrebleu.metrics import BLEU
from tests.batching.cost_examples import linear_costs
from tests.infer.families import ON_CPU, rows_of, runs_out
from torch.nn.functional import cross_entropy

from brim.batching import ByLength
from brim.config.prompts import LabelReader
from brim.config.schema import OutputFeature
from brim.data.tokens import TokenRow, TokenRows
from brim.infer.engines import Response, RowsAtOnce, RowsByCost
from brim.infer.metrics import (
    Divergence,
    Interval,
    LabelCounts,
    Runner,
    Scores,
    intervals,
    label_measures,
    rows_to_score,
    score_batches,
    score_rows,
    scores as module,
    text_measures,
)
from brim.models import precision
from brim.models.loss import NextToken


def score(model, rows, batches):
    return score_rows(
        model,
        rows,
        pad_id=1,
        batches=RowsAtOnce(batches) if isinstance(batches, int) else batches,
        objective=NextToken(),
        **ON_CPU,
    )


def test_scores_equal_those_of_each_row_alone_in_order(model, rows):
    expected_loss, expected_correct = [], []
    for row in rows:
        ids = torch.tensor([row.input_ids.tolist()])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        losses = cross_entropy(logits, ids[0, 1:], reduction="sum") if len(row.input_ids) > 1 else torch.tensor(0.0)
        expected_loss.append(losses.item())
        expected_correct.append(int((logits.argmax(-1) == ids[0, 1:]).sum()))
    for batch_rows in (1, 4, 64):
        scores = score(model, rows, batch_rows)
        assert scores.keys.tolist() == [row.key for row in rows]
        assert scores.num_supervised.tolist() == [len(row.input_ids) - 1 for row in rows]
        assert scores.loss == pytest.approx(expected_loss, rel=1e-5)
        assert scores.num_correct.tolist() == expected_correct
    assert all(parameter.grad is None for parameter in model.parameters())
    order = np.random.default_rng(3).permutation(len(rows))
    shuffled = score(model, rows.take(order), 4)
    assert shuffled.keys.tolist() == scores.keys[order].tolist()
    assert shuffled.loss == pytest.approx(np.array(expected_loss)[order], rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_put_back(model, rows, training):
    own, modes = copy.deepcopy(model).train(training), []
    with own.register_forward_hook(lambda module, *_: modes.append(module.training)):
        score(own, rows.take([0, 2]), 2)
    assert (modes, own.training) == ([False], training)


def test_scores_are_the_same_where_memory_ran_out_on_the_way(model, rows):
    same, at_once = score(model, rows, 2), RowsAtOnce(8)
    by_cost = RowsByCost(ByLength(costs=linear_costs(), cap_bytes=4_000))
    for batches, rtol in ((at_once, 0), (by_cost, 1e-5)):
        with runs_out(model, lambda rows, tokens, number: rows > 2) as limit:
            scores = score(model, rows, batches)
        assert limit.times > 0
        np.testing.assert_allclose(scores.loss, same.loss, rtol=rtol)
        np.testing.assert_array_equal(scores.num_correct, same.num_correct)
        np.testing.assert_array_equal(scores.num_supervised, same.num_supervised)
    assert at_once.num_rows == 2


def test_a_response_and_its_end_stand_behind_the_prompt():
    prompts = rows_of([2, 1], first_key=3)
    two, one = (row.input_ids.tolist() for row in prompts)
    responses = [
        Response(token_ids=[8], finish_reason="stop", end_id=1),
        Response(token_ids=[8, 9], finish_reason="length"),
    ]
    rows = rows_to_score(prompts, responses.__getitem__)
    assert [(row.key, row.input_ids.tolist(), row.supervised.tolist()) for row in rows] == [
        (3, [*two, 8, 1], [False, False, True, True]),
        (4, [*one, 8, 9], [False, True, True]),
    ]


@given(lengths=st.lists(st.integers(1, 40), max_size=60), most_tokens=st.integers(1, 100))
def test_batches_are_every_row_once_by_length_and_within_the_tokens(lengths, most_tokens):
    batches = [batch.tolist() for batch in score_batches(np.array(lengths, np.int64), most_tokens=most_tokens)]
    every = [position for batch in batches for position in batch]
    assert sorted(every) == list(range(len(lengths)))
    assert [lengths[position] for position in every] == sorted(lengths, reverse=True)
    for batch, following in itertools.zip_longest(batches, batches[1:]):
        assert len(batch) == 1 or len(batch) * lengths[batch[0]] <= most_tokens
        assert following is None or (len(batch) + 1) * lengths[batch[0]] > most_tokens


def scores(loss, num_correct, num_supervised):
    return Scores(
        keys=np.arange(len(loss)),
        loss=np.asarray(loss, dtype=np.float64),
        num_correct=np.asarray(num_correct),
        num_supervised=np.asarray(num_supervised),
    )


def test_means_are_over_tokens_sequence_accuracy_over_rows_and_perplexities_may_be_huge_or_none():
    assert scores([2.0, 1.0, 6.0], [1, 2, 0], [1, 2, 6]).summary() == {
        "loss": 1.0,  # 9 / 9, not the mean of 2, 0.5 and 1
        "perplexity": math.e,
        "token_accuracy": 3 / 9,
        "sequence_accuracy": 2 / 3,
        "num_rows": 3,
        "num_supervised_tokens": 9,
    }
    assert scores([5 * math.log(300)], [0], [5]).summary()["perplexity"] == pytest.approx(300)
    assert scores([4000.0], [0], [5]).summary()["perplexity"] == math.inf
    found = intervals(scores([4000.0, 1.0], [0, 0], [5, 5]).measures(), 2)
    assert found["perplexity"].high == math.inf
    some = scores(*SCORES)
    assert figures_of(some.measures()).items() <= some.summary().items()
    assert intervals(scores([3.0], [0], [2]).measures(), 1)["loss"] == Interval(low=1.5, high=1.5)
    figures = scores([math.nan, 1.0], [0, 0], [1, 1]).summary()
    assert math.isnan(figures["loss"])
    assert math.isnan(figures["perplexity"])


SCORES = ([2.0, 1.0, 6.0, 3.5], [1, 2, 0, 2], [1, 2, 6, 3])
TEXTS = (
    ["the cat sat on a mat", "a dog ran", "nothing at all here", "the end of it all is near"],
    ["the cat sat on the mat", "a dog ran fast", "something else entirely", "the end of it all was near"],
)


def figures_of(measures):
    return {name: measure.value for name, measure in measures.items()}


@pytest.mark.parametrize(
    ("measures_of", "columns"),
    [(lambda *columns: scores(*columns).measures(), SCORES), (text_measures, TEXTS)],
    ids=["scores", "texts"],
)
def test_the_measures_of_drawn_rows_are_those_of_data_of_them_and_intervals_hold_the_figures(measures_of, columns):
    measures = measures_of(*columns)
    for drawn in ([0, 1, 2, 3], [0, 0, 1, 3], [2, 2, 2, 2], [1, 2, 3, 3]):
        counts = np.bincount(drawn, minlength=4).astype(float)[None]
        expected = figures_of(measures_of(*([column[n] for n in drawn] for column in columns)))
        assert {name: measure.of(counts)[0] for name, measure in measures.items()} == pytest.approx(expected, abs=1e-9)
    found = intervals(measures, 4)
    assert all(found[name].low <= measure.value <= found[name].high for name, measure in measures.items())


BY_ROW = ("rouge1", "rouge2", "rougeL", "exact_match")
LONG = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize(
    ("responses", "references", "expected"),
    [
        ([LONG, "a b c d"], [LONG, "a b c d"], {"bleu": 100.0, **dict.fromkeys(BY_ROW, 1.0)}),
        (["one two three four five"], ["six seven eight nine ten"], dict.fromkeys(BY_ROW, 0.0)),
        (["", ""], ["a b c d", "e"], {"bleu": 0.0, **dict.fromkeys(BY_ROW, 0.0)}),
        # Row 1: 2 of 2 words right, of 4 wanted: precision 1, recall 1/2, F 2/3; pairs 1 of 1, of 3: F 1/2. Row 2: equal.
        (["the quick", "a b"], ["the quick brown fox", "a b"], {"rouge1": 5 / 6, "rouge2": 3 / 4, "exact_match": 0.5}),
        (["b a c"], ["a b c"], {"rougeL": 2 / 3, "rouge1": 1.0}),  # the longest common subsequence has two words
        # All n-grams right, 6 words where 8 are wanted.
        (["a b c d e f"], ["a b c d e f g h"], {"bleu": 100 * math.exp(1 - 8 / 6)}),
        ([" 7\n", "1  2"], ["7", "1 2"], {"exact_match": 0.5}),  # outer white space is no difference
    ],
)
def test_text_figures_by_hand(responses, references, expected):
    found = figures_of(text_measures(responses, references))
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    with pytest.raises(ValueError):
        text_measures(responses, [*references, "b"])


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "the", "fox,", "1.5"]), max_size=12).map(" ".join)


@given(pairs=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6))
def test_bleu_is_sacrebleus_of_any_corpus(pairs):
    responses, references = zip(*pairs, strict=True)
    expected = BLEU().corpus_score(list(responses), [list(references)]).score
    assert text_measures(responses, references)["bleu"].value == pytest.approx(expected, abs=1e-9)


NAMES = st.sampled_from(["yes", "no", "maybe"])


def by_hand(pairs):
    """Macro F1 over the labels that occur, from precision and recall of each."""
    found = []
    for label in {label for pair in pairs for label in pair}:
        right = sum(pair == (label, label) for pair in pairs)
        predicted, wanted = (sum(pair[side] == label for pair in pairs) for side in (0, 1))
        precision, recall = right / max(predicted, 1), right / max(wanted, 1)
        found.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return sum(found) / len(found)


@given(pairs=st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=30), seed=st.integers(0, 9))
def test_figures_of_all_rows_and_of_drawn_ones_are_those_of_a_second_implementation(pairs, seed):
    measures = label_measures(*map(list, zip(*pairs, strict=True)))
    assert measures["macro_f1"].value == pytest.approx(by_hand(pairs))
    assert measures["category_accuracy"].value == pytest.approx(np.mean([a == b for a, b in pairs]))
    drawn = np.random.default_rng(seed).integers(0, len(pairs), len(pairs))
    counts = np.bincount(drawn, minlength=len(pairs)).astype(float)[None]
    again = [pairs[number] for number in drawn]
    assert measures["macro_f1"].of(counts)[0] == pytest.approx(by_hand(again))
    assert measures["category_accuracy"].of(counts)[0] == pytest.approx(np.mean([a == b for a, b in again]))


def _feature(*, constrained=False, **match):
    rules = {label: {"type": kind, "value": value} for label, (kind, value) in match.items()}
    decoder = {"match": rules, "constrain_to_vocabulary": constrained}
    fallback = {"fallback_label": "none"}
    return OutputFeature.model_validate(
        {"name": "a", "type": "category", "preprocessing": fallback, "decoder": decoder}
    )


ANY = _feature(good=("contains", "good"))
HINT = "; with output_features.0.decoder.constrain_to_vocabulary=true the model can write nothing but labels"


def test_fallbacks_are_counted_and_told_from_answers_that_say_so():
    counts = LabelCounts()
    reader = LabelReader(_feature(good=("contains", "good"), none=("contains", "none")))
    labels = counts.extract([" good", "none", "", "well", "Good."], reader)
    assert labels == ["good", "none", "none", "none", "good"]
    assert counts.record() == {"labels": {"none": 3, "good": 2}, "num_fallback": 2, "num_looked_at_in_part": 0}
    told = "2 of 5 responses name no label and got the fallback label"
    assert counts.notes(ANY) == [told + HINT]
    assert counts.notes(_feature(constrained=True, good=("contains", "good"))) == [told]  # cut by max_new_tokens, say
    # A regular expression looks at the beginning of a long text alone.
    reader, counts = LabelReader(_feature(good=("regex", r"\w+!"), bad=("contains", "bad"))), LabelCounts()
    assert counts.extract(["fine!", "a" * 5_000 + "!"], reader) == ["good", "none"]
    fallback, long = counts.notes(ANY)
    assert fallback == f"1 of 2 responses name no label and got the fallback label{HINT}"
    assert long.startswith("1 of 2 responses are so long that a regular expression could take over 10,000,000 steps")
    assert LabelCounts().notes(ANY) == []


HALF = [0.0, 0.0]  # logits of the probabilities 1/2 and 1/2
QUARTER = [0.0, math.log(3)]  # of 1/4 and 3/4


def logits_in(*batches):
    return [torch.tensor(batch).reshape(-1, 2) for batch in batches]


def divergence_of(first, second):
    return Divergence.between(logits_in(*first), iter(logits_in(*second)))


def test_the_figures_are_means_over_the_tokens_of_all_batches_from_the_first_models_side():
    found = divergence_of([[HALF, HALF, HALF], [QUARTER]], [[HALF, HALF, QUARTER], [QUARTER]])
    assert found.num_tokens == 4
    assert found.mean_kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 4, rel=1e-6)
    assert found.same_top == 3 / 4
    assert found.max_logit_difference == pytest.approx(math.log(3))
    found = divergence_of([QUARTER], [HALF])
    assert found.mean_kl == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2), rel=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_never_near(broken):
    bad = [broken, 0.0]
    for first, second in (([HALF], [bad]), ([bad], [HALF]), ([HALF, HALF], [bad, HALF])):
        assert math.isnan(divergence_of(first, second).mean_kl)
    found = Divergence.between([], iter([]))
    assert (found.num_tokens, math.isnan(found.mean_kl), math.isnan(found.same_top)) == (0, True, True)
    with pytest.raises(ValueError, match="shorter"):
        divergence_of([HALF, HALF], [HALF])


class Echo(torch.nn.Module):
    """Logits that name the token that was read: one where the vocabulary has it."""

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids, 8).float())


HOW = Runner(pad_id=7, batch_rows=2, device=torch.device("cpu"))


def logits_for(model, *supervised):
    """The logits of rows that count up from 0, of which these tokens are supervised."""
    rows = TokenRows.from_rows(
        TokenRow(key=key, input_ids=np.arange(len(marks), dtype=np.int32), supervised=np.array(marks, dtype=np.bool_))
        for key, marks in enumerate(supervised)
    )
    return list(HOW.logits(model, rows, precision("fp32")))


def test_logits_are_those_before_each_supervised_token_and_no_more_than_the_most(monkeypatch):
    parts = logits_for(Echo(), [False, True, True], [False, False, False, True], [True, False, True])
    assert [part.argmax(-1).tolist() for part in parts] == [[0, 1, 2], [1]]  # a first token has nothing before it
    monkeypatch.setattr(module, "_MOST_TOKENS", 4)
    rows = [[False, True, True]] * 6
    assert [len(part) for part in logits_for(Echo(), *rows)] == [4]
    monkeypatch.setattr(module, "_MOST_TOKENS", 100)
    monkeypatch.setattr(module, "_MOST_BYTES", 5 * 4 * 8)
    assert [len(part) for part in logits_for(Echo(), *rows)] == [4, 1]


def test_a_batch_that_runs_out_of_memory_comes_out_whole_in_the_order_of_its_rows(monkeypatch):
    rows, model = [[False, True, True], [False, True], [False, False, False, True], [True, True]], Echo()
    with runs_out(model, lambda rows, tokens, number: rows > 1):
        assert [part.argmax(-1).tolist() for part in logits_for(model, *rows)] == [[0, 1, 0], [2, 0]]
        monkeypatch.setattr(module, "_MOST_TOKENS", 2)
        assert [len(part) for part in logits_for(model, *rows)] == [2]
