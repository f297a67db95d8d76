"""What the table and the short form say of a plan and of its phases."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.planning.hand_made import (
    hand_made_phase,
    hand_made_plan,
    plan_on_ranks,
    plan_that_adapts,
    plan_that_does_not_fit,
    plan_that_moves,
)

from brim.notes import kind_of, short_of, topic_of
from brim.planning import short_plan
from brim.report import plan_table
from brim.report.plan import short_count


def printed(plan, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width).print(plan_table(plan, title="Llama-3.2-1B"))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def words(plan):
    return " ".join(printed(plan).split())


def test_whole_and_short_plans(golden):
    plans = {"taken": hand_made_plan(), "moves": plan_that_moves(), "adapts": plan_that_adapts()}
    plans |= {"on ranks": plan_on_ranks(), "sharded": plan_on_ranks(is_sharded=True)}
    files = ("plan", "plan_that_moves", "plan_that_adapts", "plan_on_ranks", "plan_that_shards")
    for name, file in zip(plans, files, strict=True):
        golden(f"report/{file}.txt", printed(plans[name]))
    plans["does not fit"] = plan_that_does_not_fit()
    shown = ["\n".join([f"# {name}", *short_plan(plan)]) for name, plan in plans.items()]
    golden("report/plans_in_short.txt", "\n\n".join(shown))


def test_a_card_on_ranks_has_lines_of_80_columns():
    short = {topic_of(line): short_of(line) for line in short_plan(plan_on_ranks(is_sharded=True))[:4]}
    assert short["batch"] == "updates of 32 rows, 8.5 micro-batches in 4 processes, 93% busy"
    assert short["runs"] == "each process has a part of the model; 30.0 s a step, alone 1 min 48 s"
    assert max(map(len, short.values())) <= 72


def test_where_no_way_fits_the_longest_rows_are_named_if_any_is_short_enough(golden):
    golden("report/plan_that_does_not_fit.txt", printed(plan_that_does_not_fit(num_long=12)))
    assert printed(plan_that_does_not_fit(num_long=11)).endswith("and 1 more row that does not fit\n")
    plan = plan_that_does_not_fit(num_long=100)
    candidates = tuple(replace(each, longest_that_fits=None) for each in plan.candidates)
    told = printed(replace(plan, candidates=candidates))
    assert "taken       none: no row is short enough" in told
    assert "row (from 0)" not in told


def test_a_plan_that_was_found_says_so_and_one_micro_batch_a_step_is_one_and_bounds_are_told_where_known():
    plan = hand_made_plan(from_cache=True)
    assert words(plan).endswith("source an earlier plan for the same model, data and device; --replan looks again")
    first, *others = plan.candidates
    head = short_plan(replace(plan, chosen=replace(first, micro_batches_per_step=1.0)))[0]
    assert ", each in 1 micro-batch of up to 12 × 512 tokens" in head
    assert head.endswith("(found earlier; --replan looks again)")
    unknown = replace(first, bound_by=None, time_source="measured")
    told = printed(replace(plan, chosen=unknown, candidates=(unknown, *others)))
    assert "time        12 steps, about 6 min 0 s without evaluation (measured)" in told


@pytest.mark.parametrize("make", [hand_made_plan, plan_that_does_not_fit])
def test_the_short_form_says_what_the_run_takes_and_what_is_good_to_know(make):
    plan = replace(make(), advice=("the batch falls", "a step is bound by arithmetic"))
    told = short_plan(plan, phase_notes=["the batch falls"])
    head = [kind_of(line) for line in told[:-2]]
    num_notes = 0 if plan.chosen is not None else 1  # on the rows that do not fit
    assert head == ["plan"] * (len(head) - num_notes) + ["note"] * num_notes
    assert [topic_of(line) for line in told[:2]] == ["batch", "memory"]
    assert told[-2:] == list(plan.advice)
    assert [kind_of(line) for line in told[-2:]] == ["warning", "note"]
    if plan.chosen is not None:  # what would be faster than a way that is taken is a detail
        told = short_plan(replace(plan, chosen=replace(plan.chosen, advice=plan.advice[1:])))
        assert [kind_of(line) for line in told[-2:]] == ["note", "detail"]


def test_phases_are_shown_where_the_batch_moves_and_fits_those_left_out_are_counted():
    assert "\n3,997 of 4,000 phases are left out here\n" in printed(plan_that_moves(num_phases=4000))
    (phase, *_) = plan_that_moves().phases
    one_rate = plan_that_moves(phases=(replace(phase, learning_rates=(0.001, 0.001)),), num_phases=1)
    assert "  12.00  0.001\n" in printed(one_rate), "a rate that stays is told once"
    phase = hand_made_phase(1, 32, 0, 12, rates=(0.001, 0.001))
    still = hand_made_plan(smallest_batch_size=32, total_samples=384, phases=(phase,))
    assert (printed(still), short_plan(still)) == (printed(hand_made_plan()), short_plan(hand_made_plan()))
    told = words(replace(plan_that_does_not_fit(), smallest_batch_size=8, total_samples=900, num_phases=3))
    assert "schedule 8 to 32 rows in 3 phases over 900 samples" in told
    assert "learning rate" not in told


@pytest.mark.parametrize("width", [79, 80, 200])
def test_no_figure_is_cut_off(width):
    large = hand_made_phase(4095, 65_536, 10**12, 10**9, rates=(1.234e-05, 9.87e-06), total_bytes=130 * 2**30)
    large = replace(large, micro_batches_per_step=4096.0)
    plans = [hand_made_plan()]
    plans += [plan_that_moves(phases=(large,), num_phases=4096), plan_that_adapts()] if width >= 80 else []
    for plan in plans:
        told = printed(plan, width=width)
        assert "…" not in told
        assert max(map(len, told.splitlines())) <= width


def test_large_numbers_are_short():
    shown = {0: "0", 999: "999", 1000: "1k", 1254: "1.25k", 999_499: "999k", 999_500: "1M", 3 * 10**18: "3e+03P"}
    assert {number: short_count(number) for number in shown} == shown
