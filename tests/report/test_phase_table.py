"""What the table of phases says, and how the short form says it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.planning.hand_made import (
    hand_made_phase,
    hand_made_plan,
    plan_that_adapts,
    plan_that_does_not_fit,
    plan_that_moves,
)

from brim.planning import short_plan
from brim.report import plan_table
from brim.report.plan import short_count


def printed(plan, width=80):
    stream = io.StringIO()
    Console(file=stream, width=width).print(plan_table(plan, title="Llama-3.2-1B"))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def after_the_ways(plan):
    lines = printed(plan)
    begin = lines.index("widest: rows × tokens; GiB: needed in all; cuts: micro-batches a step") + 1
    return lines[begin : next(number for number, line in enumerate(lines) if line.startswith("memory")) - 1]


def test_the_phases_of_a_batch_that_moves():
    assert printed(plan_that_moves())[0] == "Llama-3.2-1B: train, updates of 8 to 32 rows, on t4"
    assert after_the_ways(plan_that_moves()) == [
        "a step, an epoch: updates of 32 rows",
        "",
        "phase  batch  samples  tokens    steps  cuts    GiB  learning rate",
        "    1      8       80   18.1k       10   1.0  12.00  1e-05 → 0.0001",
        "    2     16       80   18.1k        5   2.0  13.00  0.0001 → 9.5e-05",
        "    3     32    12.8M   2.89G  400,000   4.0  13.00  9.5e-05 → 0",
        "batch: rows of an update; tokens: about; learning rate: first and last update",
    ]


def test_the_sizes_of_a_batch_that_follows_what_is_measured():
    assert after_the_ways(plan_that_adapts()) == [
        "a step, an epoch: updates of 32 rows",
        "",
        "batch  cuts    GiB  a step",
        "    8   1.0  13.00   0.8 s",
        "   16   2.0  13.00   1.6 s",
        "   32   4.0  13.00   3.2 s",
        "batch: rows of an update. How many updates have it is measured while training",
    ]
    told = " ".join(" ".join(printed(plan_that_adapts())).split())
    assert "time 12 to 39 steps, about 6 min 0 s to 8 min 20 s without evaluation" in told
    assert "schedule 8 to 32 rows, by the noise that is measured while training" in told


def test_a_batch_that_stands_still_has_no_table():
    phase = hand_made_phase(1, 32, 0, 12, rates=(0.001, 0.001))
    still = hand_made_plan(smallest_batch_size=32, total_samples=384, phases=(phase,))
    assert printed(still) == printed(hand_made_plan())
    assert short_plan(still) == short_plan(hand_made_plan())


def test_phases_that_are_left_out_are_counted():
    plan = plan_that_moves(num_phases=4000)
    assert after_the_ways(plan)[-1] == "3,997 of 4,000 phases are left out here"


def test_a_rate_that_stays_is_told_once():
    (phase, *_) = plan_that_moves().phases
    told = after_the_ways(plan_that_moves(phases=(replace(phase, learning_rates=(0.001, 0.001)),), num_phases=1))
    assert told[3].endswith("12.00  0.001")


def test_what_does_not_fit_has_no_figures_of_phases_and_still_a_schedule():
    plan = replace(plan_that_does_not_fit(), smallest_batch_size=8, total_samples=900, num_phases=3)
    told = " ".join(" ".join(printed(plan)).split())
    assert "schedule 8 to 32 rows in 3 phases over 900 samples" in told
    assert "learning rate" not in told


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_cut_off(width):
    large = hand_made_phase(4095, 65_536, 10**12, 10**9, rates=(1.234e-05, 9.87e-06), total_bytes=130 * 2**30)
    large = replace(large, micro_batches_per_step=4096.0)
    for plan in (plan_that_moves(phases=(large,), num_phases=4096), plan_that_adapts()):
        lines = printed(plan, width=width)
        assert "…" not in "".join(lines)
        assert max(map(len, lines)) <= width


def test_the_short_form_has_a_line_for_the_schedule():
    assert short_plan(plan_that_moves())[2:4] == [
        "schedule: 8 → 32 rows in 3 phases over 12,800,160 samples, 32 from 160 on",
        "time: 400,015 steps, about 6 min 0 s without evaluation (estimated, bound by arithmetic)",
    ]
    assert short_plan(plan_that_adapts())[2] == "schedule: 8 to 32 rows, by the noise that is measured while training"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (1254, "1.25k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (10**12, "1T"),
        (3 * 10**18, "3e+03P"),
    ],
)
def test_large_numbers_are_short(number, shown):
    assert short_count(number) == shown
