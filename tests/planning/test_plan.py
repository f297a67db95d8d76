"""A plan: lengths, notes, the rows of a probe, JSON and back."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.planning.hand_made import (
    hand_made_plan,
    plan_on_ranks,
    plan_that_adapts,
    plan_that_does_not_fit,
    plan_that_moves,
)
from transformers import AutoConfig

from brim.config import load_config
from brim.planning import TrainingPlan, rows_of_pack, rows_of_shape
from brim.planning.plan import summarize_lengths
from brim.planning.training import dropout_notes, own_dropout


def test_a_plan_comes_back_from_json_also_from_before_batches_moved():
    on_ranks = [plan_on_ranks(), plan_on_ranks(is_sharded=True)]
    for plan in (hand_made_plan(), plan_that_does_not_fit(), plan_that_moves(), plan_that_adapts(), *on_ranks):
        assert TrainingPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    saved = hand_made_plan().as_dict()
    for damaged in ({}, {**saved, "budget": {"device": "t4"}}):
        with pytest.raises(ValueError, match="budget"):
            TrainingPlan.from_dict(damaged)
    for name in (
        "total_samples",
        "smallest_batch_size",
        "num_phases",
        "phases",
        "steps_between",
        "seconds_between",
        "strategy_reason",
    ):
        del saved[name]
    for candidate in (saved["chosen"], *saved["candidates"]):
        for name in ("update_s", "wire", "busy_share", "seconds_per_epoch_alone"):
            del candidate[name]
        del candidate["way"]["is_sharded"]
    assert TrainingPlan.from_dict(json.loads(json.dumps(saved))) == hand_made_plan()


def test_a_batch_moves_where_its_sizes_differ_and_the_least_seconds_are_known():
    for plan in (plan_that_moves(), plan_that_adapts()):
        assert (plan.batch_moves, plan.least_seconds) == (True, 360.0)
    stays = hand_made_plan(), hand_made_plan(smallest_batch_size=32), plan_that_does_not_fit()
    assert [(plan.batch_moves, plan.least_seconds) for plan in stays] == [(False, 360.0), (False, 360.0), (False, 0.0)]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_every_row_is_in_one_bin_and_percentiles_are_rows(lengths):
    summary = summarize_lengths(lengths)
    assert (summary.num_rows, summary.num_tokens) == (len(lengths), sum(lengths))
    assert (summary.shortest, summary.longest) == (min(lengths), max(lengths))
    bounds = [bound for bound, _ in summary.histogram]
    assert bounds == [bounds[0] * 2**number for number in range(len(bounds))]
    for bound, count in summary.histogram:
        assert count == sum(bound // 2 < length <= bound for length in lengths)
    assert sum(count for _, count in summary.histogram) == len(lengths)
    for share, value in ((50, summary.median), (90, summary.p90), (99, summary.p99)):
        assert value in lengths
        at_most, below = sum(length <= value for length in lengths), sum(length < value for length in lengths)
        assert at_most >= share / 100 * len(lengths) > below


def test_the_longest_rows_that_are_short_enough_are_taken_again_where_there_are_too_few():
    lengths = np.array([5, 9, 3, 9, 7, 2])
    assert rows_of_shape(lengths, rows=2, tokens=9).tolist() == [1, 3]
    assert rows_of_shape(lengths, rows=3, tokens=8).tolist() == [4, 0, 2]
    assert rows_of_shape(lengths, rows=5, tokens=3).tolist() == [2, 5, 2, 5, 2]


def test_rows_that_stand_for_a_pack_have_its_tokens():
    lengths = np.array([120, 30, 5, 40, 9])
    assert rows_of_pack(lengths, rows=3, tokens=126).tolist() == [0, 0, 0, 4, 4]  # 378 tokens: 120 three times, 9, 9
    assert rows_of_pack(lengths, rows=1, tokens=120).tolist() == [0]
    assert rows_of_pack(lengths, rows=2, tokens=35).tolist() == [1, 1, 4]
    assert rows_of_pack(np.array([255, 258]), rows=2, tokens=254).tolist() == [0]  # no row is short enough
    assert rows_of_pack(np.array([255, 258]), rows=1, tokens=200).tolist() == [0]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 40), st.data())
def test_a_shape_of_the_data_is_met_exactly(lengths, rows, data):
    tokens = data.draw(st.sampled_from(lengths))
    taken = rows_of_shape(np.array(lengths), rows=rows, tokens=tokens)
    short_enough = [length for length in lengths if length <= tokens]
    assert len(taken) == rows
    assert max(lengths[row] for row in taken) == tokens
    assert sorted(lengths[row] for row in set(taken.tolist())) == sorted(short_enough)[-rows:]


def test_notes_of_dropout():
    def notes(adapter, *, by_row=False, base=None):
        trainer = {"type": "finetune", "batch_size": 1, "dropout_by_row": by_row}
        loaded = load_config({"base_model": "x/y", "adapter": adapter, "trainer": trainer})
        return list(dropout_notes(loaded.config, base or {}))

    lora = {"type": "lora"}
    assert notes({**lora, "dropout": 0.0}) == notes({**lora, "dropout": 0.1}, by_row=True) == notes(None) == []
    assert notes(None, by_row=True) == ["trainer.dropout_by_row changes nothing: there is no adapter"]
    (nothing,) = notes({**lora, "dropout": 0}, by_row=True)
    assert nothing == "trainer.dropout_by_row changes nothing: adapter.dropout is 0"
    (drawn,) = notes(lora)
    assert drawn.startswith("adapter.dropout 0.05 is drawn for each micro-batch")
    assert "losses are close and not equal" in drawn
    assert drawn.endswith("trainer.dropout_by_row: true makes them equal")
    (own,) = notes(lora, by_row=True, base={"attn_pdrop": 0.1, "embd_pdrop": 0.25})
    assert own.startswith("the base model has dropout of its own (attn_pdrop 0.1, embd_pdrop 0.25), which trainer.")
    (alone,) = notes(None, base={"dropout": 0.1})
    assert alone.startswith("the base model has dropout of its own (dropout 0.1): partitioned differently")


def test_the_base_models_own_dropout():
    gpt2 = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    for family, expected in {"llama": {}, "gpt2": gpt2, "opt": {"dropout": 0.1}, "phi3": {}, "falcon": {}}.items():
        assert own_dropout(AutoConfig.for_model(family).to_dict()) == expected
    # Of the text part, and not of other heads.
    text = {"attention_dropout": 0.2, "resid_pdrop": 0.0, "classifier_dropout": 0.3, "hidden_dropout": None}
    assert own_dropout({"dropout": 0, "text_config": text}) == {"attention_dropout": 0.2}
