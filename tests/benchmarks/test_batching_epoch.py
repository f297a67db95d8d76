"""How the race between brim and its peers is run and read, without training anything."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from benchmarks.batching_epoch import (
    Trial,
    contenders,
    fastest,
    half_of_whole_batch,
    largest_difference,
    race,
    summarize,
)
from benchmarks.batching_peers import accumulation_of_packs
from benchmarks.batching_run import Outcome, Spec

SPEC = Spec(folder="nowhere", device="cpu", contender="brim", num_threads=1)
OUTCOME = Outcome(
    train_s=10.0,
    whole_s=12.0,
    losses=[2.0, 1.0],
    num_tokens=1000,
    num_padded_tokens=1100,
    num_micro_batches=4,
    micro_batch_rows=None,
    num_out_of_memory=0,
    peak_bytes=5,
    held_out_loss=1.5,
)


def _trial(rows: int, tokens_per_s: float | None) -> Trial:
    return Trial(way="fixed", micro_batch_rows=rows, accumulation_steps=32 // rows, tokens_per_s=tokens_per_s)


def test_the_hand_search_takes_the_fastest_and_of_equals_the_smaller():
    trials = [_trial(1, 900.0), _trial(4, 1000.0), _trial(2, 1000.0), _trial(32, None)]
    assert fastest(trials, "fixed") == _trial(2, 1000.0)
    assert fastest([_trial(32, None)], "fixed") is None


def test_the_limit_leaves_half_of_what_the_whole_batch_takes_beside_what_is_never_used():
    whole = replace(_trial(32, 100.0), peak_bytes=8 * 2**30)
    assert half_of_whole_batch([_trial(1, 900.0), whole]) == int(5.75 * 2**30)
    assert half_of_whole_batch([_trial(32, None)]) is None


def test_contenders_are_brim_the_best_of_each_way_and_auto_find_from_the_whole_batch():
    chosen = contenders({"brim": SPEC}, [_trial(1, 900.0), _trial(2, 1000.0)])
    assert list(chosen) == ["brim", "fixed", "auto_find"]
    assert chosen["fixed"] == replace(SPEC, contender="fixed", micro_batch_rows=2, accumulation_steps=16)
    assert (chosen["auto_find"].micro_batch_rows, chosen["auto_find"].accumulation_steps) == (32, 1)


def test_contenders_take_turns_and_every_other_round_goes_backwards():
    order: list[str] = []

    def start(spec: Spec) -> Outcome:
        order.append(spec.contender + ("+score" if spec.scores else ""))
        return OUTCOME

    specs = {name: replace(SPEC, contender=name) for name in ("brim", "fixed", "auto_find")}
    outcomes = race(specs, rounds=3, once=["auto_find"], say=lambda line: None, start=start)
    assert order == ["brim+score", "fixed+score", "auto_find+score", "fixed", "brim", "brim", "fixed"]
    assert [len(runs) for runs in outcomes.values()] == [3, 3, 1]


def test_the_summary_compares_rounds_and_losses():
    peer = replace(OUTCOME, losses=[2.0, 1.01], micro_batch_rows=1)
    found = summarize(
        {
            "brim": [replace(OUTCOME, train_s=s) for s in (10.0, 20.0, 10.0)],
            "fixed": [replace(peer, train_s=s) for s in (15.0, 20.0, 12.0)],
            "packing": [replace(peer, train_s=s) for s in (9.0, 18.0, 9.0)],
        }
    )
    ours, fixed, packing = found
    assert (ours.train_s, ours.brim_is_faster, ours.goal) == (10.0, 1.0, None)
    assert (fixed.train_s, fixed.brim_is_faster, fixed.goal) == (15.0, 1.2, 1.0)
    assert fixed.loss_difference == pytest.approx(0.01)
    assert (fixed.is_met, packing.is_met) == (False, False)  # other losses; not faster
    assert (packing.brim_is_faster, packing.loss_difference) == (0.9, None)  # its batches hold other rows
    assert fixed.padding == 1.1


def test_a_loss_that_is_no_number_is_infinitely_far():
    assert largest_difference([1.0, math.nan], [1.0, 1.0]) == math.inf
    assert largest_difference([1.0, 2.0], [1.0, 4.0]) == 0.5


def test_an_update_over_packs_sees_about_an_effective_batch_of_rows():
    # 32 rows of 192 tokens are four packs of 1,536.
    assert [accumulation_of_packs([192] * 10, micro_batch_packs=packs) for packs in (1, 2, 4, 8)] == [4, 2, 1, 1]
