"""The benchmarks of batching: how races, runs under limits and searches are run and judged, without training anything."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.batching_budgets import WRONG_BY, budget_runs
from benchmarks.batching_epoch import (
    Trial,
    contenders,
    fastest,
    half_of_whole_batch,
    largest_difference,
    race,
    summarize,
)
from benchmarks.batching_hooks import counting_padded_tokens
from benchmarks.batching_padding import padded_over_real, paddings
from benchmarks.batching_peers import accumulation_of_packs
from benchmarks.batching_run import Outcome, RunFailed, Spec, last_words
from benchmarks.batching_search import Calibration, summary
from benchmarks.dealing import made_up_costs, measure
from benchmarks.search_contenders import Watched
from benchmarks.search_oracle import foretell
from benchmarks.search_subject import random_case, subject

from brim.batching import Costs, GradientStep, Surface, by_costs

SPEC = Spec(folder="nowhere", device="cpu", contender="brim", num_threads=1)
MIB = 2**20
OUTCOME = Outcome(
    train_s=10.0, whole_s=12.0, losses=[2.0, 1.0], num_tokens=1000, num_padded_tokens=1100, num_micro_batches=4,
    micro_batch_rows=None, num_out_of_memory=0, peak_bytes=5, held_out_loss=1.5, beside_bytes=1000 * MIB,
    passes_bytes=4000 * MIB, plan={"launch": {"probes": [{"outcome": "fits"}]}},
)  # fmt: skip


def test_a_run_meets_its_goal_with_close_losses_and_few_failures_and_the_smallest_limit_is_the_least_that_runs():
    by_limit = {
        5000 * MIB: replace(OUTCOME, losses=[2.0, 1.0 + 2e-5]),  # further than 1e-5
        3000 * MIB: replace(OUTCOME, num_out_of_memory=1),  # allowed to the wrong model alone
        2000 * MIB: replace(OUTCOME, plan={"launch": {"probes": [{"outcome": "out_of_memory"}] * 6}}),
    }

    def start(spec):
        asked.append((spec.limit_bytes, spec.wrong_by))
        if spec.limit_bytes is not None and spec.limit_bytes < least_bytes:
            raise RunFailed(reason)
        return by_limit.get(spec.limit_bytes or 0, OUTCOME)

    asked, least_bytes, reason = [], 1520 * MIB, "brim.errors.InputError: rows do not fit even alone: row 3"
    runs = budget_runs(SPEC, "lora", say=lambda line: None, start=start)
    assert [(run.limit, run.wrong_by, run.is_met) for run in runs] == [
        ("none", None, True),
        ("100%", None, False),
        ("50%", None, False),
        ("50%", WRONG_BY, True),
        ("25%", None, False),
        ("25%", WRONG_BY, False),  # six are too many
        ("one row", None, True),
    ]
    # Beside what the process takes, 1,000 MiB, shares of what the passes take.
    shares = [(5000, None), (3000, None), (3000, WRONG_BY), (2000, None), (2000, WRONG_BY)]
    assert asked[:6] == [(None, None), *((mib * MIB, wrong) for mib, wrong in shares)]
    assert 520 * MIB <= runs[-1].tensor_bytes < 536 * MIB
    reason = "killed"
    failed = budget_runs(SPEC, "full", say=lambda line: None, start=start)[-1]
    assert (failed.goal, failed.is_met, failed.failure) == (1e-4, False, "killed")


def _trial(rows, tokens_per_s):
    return Trial(way="fixed", micro_batch_rows=rows, accumulation_steps=32 // rows, tokens_per_s=tokens_per_s)


def test_the_hand_search_takes_the_fastest_and_of_equals_the_smaller_and_contenders_are_the_best_of_each_way():
    trials = [_trial(1, 900.0), _trial(4, 1000.0), _trial(2, 1000.0), _trial(32, None)]
    assert fastest(trials, "fixed") == _trial(2, 1000.0)
    assert fastest([_trial(32, None)], "fixed") is None
    chosen = contenders({"brim": SPEC}, trials)
    assert list(chosen) == ["brim", "fixed", "auto_find"]
    assert chosen["fixed"] == replace(SPEC, contender="fixed", micro_batch_rows=2, accumulation_steps=16)
    assert (chosen["auto_find"].micro_batch_rows, chosen["auto_find"].accumulation_steps) == (32, 1)
    order = []

    def start(spec):
        order.append(spec.contender)
        return OUTCOME

    race(chosen, rounds=2, once=["auto_find"], say=lambda line: None, start=start)
    assert order == ["brim", "fixed", "auto_find", "fixed", "brim"], "in turn, every other round backwards"
    # The limit leaves half of what the whole batch takes, beside what is never used.
    assert half_of_whole_batch([replace(_trial(32, 100.0), peak_bytes=8 * 2**30)]) == int(5.75 * 2**30)
    assert half_of_whole_batch([_trial(32, None)]) is None


def test_the_summary_compares_rounds_and_losses():
    peer = replace(OUTCOME, losses=[2.0, 1.01], micro_batch_rows=1)
    ours, fixed, packing = summarize(
        {
            "brim": [replace(OUTCOME, train_s=s) for s in (10.0, 20.0, 10.0)],
            "fixed": [replace(peer, train_s=s) for s in (15.0, 20.0, 12.0)],
            "packing": [replace(peer, train_s=s) for s in (9.0, 18.0, 9.0)],
        }
    )
    assert (ours.train_s, ours.brim_is_faster, ours.goal) == (10.0, 1.0, None)
    assert (fixed.train_s, fixed.brim_is_faster, fixed.goal) == (15.0, 1.2, 1.0)
    assert fixed.loss_difference == pytest.approx(0.01)
    assert (fixed.is_met, packing.is_met) == (False, False)  # other losses; not faster
    assert (packing.brim_is_faster, packing.loss_difference) == (0.9, None)  # its batches hold other rows
    assert fixed.padding == 1.1


def test_losses_that_are_no_numbers_packs_and_last_words():
    assert largest_difference([1.0, math.nan], [1.0, 1.0]) == math.inf
    assert largest_difference([1.0, 2.0], [1.0, 4.0]) == 0.5
    # 32 rows of 192 tokens are four packs of 1,536.
    assert [accumulation_of_packs([192] * 10, micro_batch_packs=packs) for packs in (1, 2, 4, 8)] == [4, 2, 1, 1]
    error = "brim.errors.OutOfMemoryError: step 1: row 18 ran out of memory"
    traceback = 'Traceback (most recent call last):\n  File "/home/someone/x.py", line 1\n    raise Error\n'
    assert last_words(f"a warning\n{traceback}{error}\n  fix: shorter rows\n") == f"{error} fix: shorter rows"
    assert [last_words(text) for text in ("loading\nKilled\n", "")] == ["Killed", ""]


def _costs(*, launch_s):
    """One byte and one second a padded token, and `launch_s` a micro-batch."""
    peak = Surface(base=0.0, lengths=(1,), tokens=((1,),), values=((1.0,),))
    time = Surface(base=launch_s, lengths=(1,), tokens=((1,),), values=((launch_s + 1.0,),))
    return Costs(peak=peak, static_bytes=0, time=time)


def test_padding_is_counted_by_micro_batch_and_avoided_where_launches_cost_less():
    steps = [[np.array([4, 1]), np.array([2, 2])], [np.array([3])]]
    assert padded_over_real(steps) == pytest.approx((8 + 4 + 3) / (5 + 4 + 3))
    lengths = np.array([10, 100] * 16)  # one effective batch of 32 rows
    (cheap,), (dear,) = (paddings(lengths, _costs(launch_s=each), fixed_rows=(32,)) for each in (1.0, 10_000.0))
    assert cheap.fixed == cheap.brim_largest == pytest.approx(3200 / 1760, abs=1e-4), "all rows fit at once"
    assert (cheap.cap_bytes, cheap.brim, cheap.brim_micro_batches_per_step) == (3200, 1.0, 2.0)
    assert (cheap.waste_over_fixed_waste, dear.waste_over_fixed_waste) == (0.0, 1.0)
    assert dear.brim_micro_batches_per_step == 1.0


@pytest.mark.parametrize(("packed", "num_tokens"), [(False, 300 + 3 * 50), (True, 448)])
def test_tokens_that_go_through_the_model_are_counted_with_padding_or_with_what_fills_packed_rows_up(
    packed, num_tokens
):
    def backward(rows):
        return torch.zeros(())

    cutter = by_costs(made_up_costs(packed=packed), cap_bytes=4096)
    step = GradientStep(cutter=cutter, parameters=[], backward=backward, on_event=print)
    with counting_padded_tokens() as padded:
        step.run(np.array([300, 50, 40, 20]))  # packed, 410 are filled up to a multiple of 64
    assert padded.num_tokens == num_tokens


def test_the_figures_of_a_contender():
    tried = ((99, 100, [99], []), (90, 100, [101, 50, 90], [101]), (11, 10, [8, 16], [16]))
    cases = [
        {"largest": largest, "found": {"one": {"size": size, "tried": run, "out_of_memory": out, "seconds": 1.0}}}
        for size, largest, run, out in tried
    ]
    found = summary(cases)["one"]
    assert found["out_of_memory"] == {"median": 1, "least": 0, "most": 1, "sum": 2}
    assert found["probes"] == {"median": 2, "least": 1, "most": 3, "sum": 6}
    assert found["share_of_largest"] == {"median": 0.99, "least": 0.9, "most": 1.0, "sum": 2.89}
    assert {key: value for key, value in found.items() if isinstance(value, int)} == {
        "cases_without_out_of_memory": 1,
        "cases_of_one_probe_without_out_of_memory": 1,
        "cases_at_98_percent": 2,
        "cases_within_one_row": 2,
        "cases_answered_with_a_size_never_run": 1,
        "cases_answered_above_largest": 1,
        "cases_without_answer": 0,
    }


def test_what_was_tried_is_watched(tmp_path):
    torch.manual_seed(0)
    watched = Watched(subject(random_case(0, "counted"), tmp_path))
    for size in (1, 1, 2):
        watched.step(size)
    assert (watched.sizes, watched.failed) == ([1, 2], [])

    def out_of_memory(loss):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            watched.step(2, out_of_memory)
    assert (watched.sizes, watched.failed) == ([1, 2, 2], [2, 2])


def test_the_prediction_is_of_what_the_step_adds(tmp_path):
    built = subject(random_case(3, "counted"), tmp_path)
    foretold = foretell(built, room_bytes=2**25, most_rows=64)
    calibration = Calibration(beyond_bytes=(5, -3, 4))
    assert (calibration.constant_bytes, calibration.margin_bytes) == (4, 8), "the middle, and the range"
    assert type(foretold).from_dict(json.loads(json.dumps(foretold.as_dict()))) == foretold
    weights = sum(weight.nbytes for weight in {id(w): w for w in built.model.parameters()}.values())
    assert weights <= foretold.weights_bytes < 1.2 * weights
    # Gradients and two moments, whatever the rows.
    assert foretold(1) > 3 * weights
    assert foretold(64) - foretold(32) == pytest.approx(32 * (foretold(32) - foretold(16)) / 16, rel=0.05)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_what_is_dealt_lies_between_one_cut_and_the_bound(rows):
    lengths = np.random.default_rng(0).integers(20, 600, 96)
    found = measure(lengths, rows=rows, most_tokens=500, size=32, ranks=4)
    assert found.num_steps == 3
    assert 0 < found.of_ideal_with_one_cut <= found.of_ideal <= found.bound_by_longest_row <= 1
    assert found.of_ideal_in_lockstep <= found.of_ideal <= found.busy <= 1
    costs = made_up_costs(packed=False)
    assert costs.seconds([1, 3], [1000, 100]).tolist() == pytest.approx([110 + 1000 * 17 / 16, 110 + 300 * 161 / 160])
