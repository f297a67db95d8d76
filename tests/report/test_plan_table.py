"""What the table and the short form say of a plan."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.planning.hand_made import hand_made_plan, plan_that_does_not_fit

from brim.notes import kind_of, topic_of
from brim.planning import LengthSummary, short_plan
from brim.report import plan_table
from brim.report.plan import lengths_in_words


def printed(plan, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width).print(plan_table(plan, title="Llama-3.2-1B"))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_whole_plan():
    assert printed(hand_made_plan()) == [
        "Llama-3.2-1B: train, updates of 32 rows, on t4",
        "",
        "100 rows, 22,612 tokens",
        "17 to 1,417 tokens a row: half up to 100, 90% up to 300, 99% up to 1,024",
        "",
        "tokens up to  rows",
        "          32     3  ██",
        "          64     0",
        "         128    60  ██████████████████████████████",
        "         256     0",
        "         512    30  ███████████████",
        "       1,024     6  ███",
        "       2,048     1  ▏",
        "",
        "checkpointing  loss       widest    GiB  padding  cuts     a step    an epoch",
        "→ off          chunks   12 × 512  13.00     3.1%   4.2     30.0 s   2 min 0 s",
        "  off          whole   1 × 1,417  16.00                 too large",
        "  on           chunks   12 × 512   7.00     3.1%   4.2     40.0 s  2 min 40 s",
        "  on           whole   1 × 1,417  16.00                 too large",
        "widest: rows × tokens; GiB: needed in all; cuts: micro-batches a step",
        "",
        "memory      15.0 GiB (all that the device has), less 512.0 MiB outside PyTorch",
        "            and a margin of 300.0 MiB (2% of the budget)",
        "too large   no checkpointing, whole logits; checkpointing, whole logits: the",
        "            longest row, 1,417 tokens, takes 15.0 GiB alone, and 13.0 GiB are",
        "            there",
        "taken       no checkpointing, loss in chunks",
        "why         an epoch takes 2 min 0 s, checkpointing, loss in chunks 2 min 40 s",
        "time        12 steps, about 6 min 0 s without evaluation (estimated, bound by",
        "            arithmetic)",
        "note        adapter.dropout 0.05: another cut draws other masks, so losses are",
        "            not the same on every card",
    ]


def test_no_way_that_fits_names_the_rows_the_longest_first():
    told = printed(plan_that_does_not_fit(num_long=12))
    assert "taken       none: rows of up to 1,024 tokens fit" in told
    assert "too large   every way: the longest row, 1,417 tokens, takes 15.0 GiB alone, and" in told, (
        "one reason is told once"
    )
    at = told.index("row (from 0)  tokens  needed alone")
    assert told[at + 1 : at + 3] == [
        "          77   1,411      16.0 GiB",
        "          70   1,410      16.0 GiB",
    ]
    assert told[at + 11 :] == ["and 2 more rows that do not fit"]
    assert not [line for line in told if line.startswith(("why", "time"))]


def test_one_row_more_than_are_shown_is_one():
    assert printed(plan_that_does_not_fit(num_long=11))[-1] == "and 1 more row that does not fit"


def test_where_no_row_is_short_enough_none_is_named():
    plan = plan_that_does_not_fit(num_long=100)
    candidates = tuple(replace(each, longest_that_fits=None) for each in plan.candidates)
    told = printed(replace(plan, candidates=candidates))
    assert "taken       none: no row is short enough" in told
    assert not any("row (from 0)" in line for line in told)


def test_a_plan_that_was_found_says_so():
    told = " ".join(" ".join(printed(hand_made_plan(from_cache=True))).split())
    assert told.endswith("source an earlier plan for the same model, data and device; --replan looks again")


@pytest.mark.parametrize("width", [79, 80, 200])
def test_no_figure_is_cut_off(width):
    assert "…" not in "".join(printed(hand_made_plan(), width=width))


def test_what_a_step_is_bound_by_is_told_where_it_is_known():
    plan = hand_made_plan()
    unknown = replace(plan.candidates[0], bound_by=None, time_source="measured")
    told = printed(replace(plan, chosen=unknown, candidates=(unknown, *plan.candidates[1:])))
    assert "time        12 steps, about 6 min 0 s without evaluation (measured)" in told


def test_the_short_form():
    assert short_plan(hand_made_plan()) == [
        "plan: no checkpointing, loss in chunks; 4.2 micro-batches a step, of up to 12 × 512 tokens, 3.1% padding",
        "memory: 13.0 GiB of 15.0 GiB (all that the device has; margin 300.0 MiB: 2% of the budget)",
        "time: 12 steps, about 6 min 0 s without evaluation (estimated, bound by arithmetic)",
        "adapter.dropout 0.05: another cut draws other masks, so losses are not the same on every card",
    ]


def test_one_micro_batch_a_step_is_one():
    plan = hand_made_plan(from_cache=True)
    plan = replace(plan, chosen=replace(plan.candidates[0], micro_batches_per_step=1.0))
    assert short_plan(plan)[0] == (
        "plan: no checkpointing, loss in chunks; 1 micro-batch a step, of up to 12 × 512 tokens, 3.1% padding "
        "(found earlier; --replan looks again)"
    )


@pytest.mark.parametrize("make", [hand_made_plan, plan_that_does_not_fit])
def test_the_short_form_says_what_the_run_takes_and_what_is_good_to_know(make):
    plan = replace(make(), advice=("the batch falls", "a step is bound by arithmetic"))
    told = short_plan(plan, phase_notes=["the batch falls"])
    head = [kind_of(line) for line in told[:-2]]
    assert head == ["plan"] * len(head)
    assert [topic_of(line) for line in told[:2]] == ["plan", "memory"]
    assert told[-2:] == list(plan.advice)
    assert [kind_of(line) for line in told[-2:]] == ["warning", "note"]


def test_what_would_be_faster_is_a_detail_of_a_way_that_is_taken():
    plan = hand_made_plan()
    faster = "a step is bound by arithmetic (70% of its time)"
    chosen = replace(plan.chosen, advice=(faster,))
    told = short_plan(replace(plan, chosen=chosen, advice=("the losses differ", faster)))
    assert [(str(line), kind_of(line)) for line in told[-2:]] == [("the losses differ", "note"), (faster, "detail")]


def test_the_short_form_of_what_does_not_fit():
    assert short_plan(plan_that_does_not_fit())[:2] == [
        "plan: no way fits; no checkpointing, loss in chunks: the longest row, 1,417 tokens, takes 15.0 GiB alone, and "
        "13.0 GiB are there",
        "memory: 15.0 GiB (all that the device has), less 512.0 MiB outside PyTorch and a margin of 300.0 MiB "
        "(2% of the budget)",
    ]


def test_a_single_row_of_a_single_token_is_told_in_the_singular():
    single = LengthSummary(
        num_rows=1, num_tokens=1, shortest=1, median=1, p90=1, p99=1, longest=1, histogram=((16, 1),)
    )
    assert list(lengths_in_words(single)) == [
        "1 row, 1 token",
        "1 to 1 token a row: half up to 1, 90% up to 1, 99% up to 1",
    ]
    plan = replace(hand_made_plan(), lengths=single, total_steps=1, effective_batch_size=1)
    assert repr(plan).startswith("TrainingPlan: 1 step, updates of 1 row, on ")
