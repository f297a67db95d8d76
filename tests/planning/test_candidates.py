"""What a way costs: its cap, its cut of an epoch and its time, by hand for costs that are straight lines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.batching.cost_examples import linear_costs

from brim.memory import Budget
from brim.planning import cut_anew, epoch
from brim.planning.candidates import WayCosts, candidate
from brim.planning.plan import Task, Way

# 1,000 bytes and 10 a token; 1 s and 10 ms a token. The fastest cuts of the two effective batches of four are
# 2 × 100 and 2 × 7 tokens (4.14 s), and 4 × 80 tokens (4.2 s).
COSTS = linear_costs()
LENGTHS = np.array([40, 100, 7, 7, 80, 33, 33, 60])


def way_costs(**changes):
    known = WayCosts(
        way=Way(gradient_checkpointing=False, chunked_loss=True),
        costs=COSTS,
        least_bytes=1200,
        state_bytes=100,
        update_s=0.5,
        overhead_bytes=lambda shapes: 0,
        bound_by=lambda shapes: "arithmetic",
        advice=lambda shapes: (f"{len(shapes)} shapes",),
        time_source="estimated",
        traced_at=lambda rows, tokens: COSTS,
    )
    return replace(known, **changes)


def task(**changes):
    return replace(Task(lengths=LENGTHS, effective_batch_size=4, fixed_rows=None, largest=False), **changes)


def budget(reserved_bytes):
    return Budget(
        device="cpu",
        limit_bytes=reserved_bytes + 700,
        outside_bytes=500,
        margin_bytes=200,
        limit_reason="memory.budget",
        margin_reason="memory.margin",
    )


def test_with_room_to_spare_the_cut_is_the_fastest():
    found = candidate(way_costs(), task(), budget(9300))
    assert found.fits
    assert not found.cap_binds
    assert found.cap_bytes == 9300
    assert found.widest == (4, 80)
    assert found.total_bytes == 4200 + 500
    assert found.single_row_bytes == 2000 + 500
    assert found.micro_batches_per_step == 1.5
    assert found.padding == pytest.approx((200 + 14 + 320) / 360)
    assert found.seconds_per_epoch == pytest.approx(4.14 + 4.2 + 2 * 0.5)
    assert found.reason == "its largest micro-batch, 4 × 80 tokens, makes 4.6 KiB in all"
    assert (found.bound_by, found.longest_that_fits, found.too_long) == ("arithmetic", 100, ())


def test_under_a_cap_that_binds_the_cut_is_the_fastest_that_fits():
    found = candidate(way_costs(), task(), budget(4199))  # one byte too few for 4 × 80 tokens
    assert found.cap_binds
    assert found.widest == (2, 100)
    assert found.micro_batches_per_step == 2
    assert found.seconds_per_epoch == pytest.approx(4.14 + 4.26 + 2 * 0.5)
    assert found.total_bytes == 3000 + 500


def test_the_largest_is_as_few_micro_batches_as_fit():
    found = candidate(way_costs(), task(largest=True), budget(9300))
    assert found.widest == (4, 100)
    assert found.micro_batches_per_step == 1
    assert found.seconds_per_epoch == pytest.approx(5.0 + 4.2 + 2 * 0.5)


def test_what_the_allocator_needs_for_the_shapes_of_the_cut_is_left_to_it():
    asked = []

    def overhead(shapes):
        asked.append(list(shapes))
        return 600 if (4, 80) in shapes else 300

    roomy = candidate(way_costs(overhead_bytes=overhead), task(), budget(4800))
    assert (roomy.cap_bytes, roomy.cap_binds, roomy.widest) == (4200, False, (4, 80))
    assert roomy.total_bytes == 4200 + 600 + 500
    tight = candidate(way_costs(overhead_bytes=overhead), task(), budget(4799))
    assert (tight.cap_bytes, tight.cap_binds, tight.widest) == (4199, True, (2, 100))
    assert asked[0] == [(1, 100)]


def test_an_overhead_that_never_settles_ends_with_a_cap_that_was_left():
    calls = iter(range(1, 100))
    found = candidate(way_costs(overhead_bytes=lambda shapes: 100 * next(calls)), task(), budget(4250))
    assert found.cap_bytes == 4250 - 500
    assert found.fits
    assert found.widest == (2, 100)


def test_rows_that_do_not_fit_are_named_by_position():
    found = candidate(way_costs(), task(), budget(1600))
    assert not found.fits
    assert found.too_long == (1, 4)
    assert found.longest_that_fits == 60
    assert found.reason == "the longest row, 100 tokens, takes 2.0 KiB, 1.6 KiB are there"
    assert found.single_row_bytes == 2000 + 500
    assert (found.total_bytes, found.widest, found.seconds_per_epoch) == (None, None, None)


def test_a_row_that_takes_all_there_is_fits():
    assert candidate(way_costs(), task(), budget(2000)).widest is not None
    assert candidate(way_costs(), task(), budget(1999)).too_long == (1,)


def test_an_update_that_does_not_fit_is_told_before_the_rows():
    found = candidate(way_costs(least_bytes=6000), task(), budget(5000))
    assert not found.fits
    assert found.reason == "weights and optimizer alone take 5.9 KiB, 4.9 KiB are there"
    assert found.single_row_bytes == 6000 + 500


def test_an_update_that_takes_more_than_any_micro_batch_is_the_total():
    found = candidate(way_costs(least_bytes=6000), task(), budget(9300))
    assert found.total_bytes == found.single_row_bytes == 6000 + 500


def test_a_number_of_rows_is_kept_whatever_it_takes():
    found = candidate(way_costs(), task(fixed_rows=3), budget(9300))
    assert found.widest == (3, 100)
    assert found.micro_batches_per_step == 2
    assert found.padding == pytest.approx((300 + 7 + 240 + 33) / 360)
    unfit = candidate(way_costs(), task(fixed_rows=3), budget(3999))
    assert not unfit.fits
    assert unfit.reason == "3 × 100 tokens take 3.9 KiB, 3.9 KiB are there"
    assert unfit.too_long == ()
    assert unfit.longest_that_fits == 99  # 1,000 bytes and 3 × 990


def test_what_many_rows_need_beside_them_is_not_held_against_one():
    """The allocator's overhead of 30 × 100 tokens leaves nothing; a row alone fits, and 30 rows of 9 tokens do."""
    known = way_costs(overhead_bytes=lambda shapes: sum(rows * tokens for rows, tokens in shapes))
    unfit = candidate(known, task(fixed_rows=30, effective_batch_size=30), budget(4000))
    assert unfit.reason == "8 × 100 tokens take 8.8 KiB, 3.1 KiB are there"
    assert unfit.too_long == ()
    assert unfit.single_row_bytes == 2000 + 500 + 100
    (longest,) = [n for n in range(1, 100) if 1000 + 330 * n <= 4000 < 1000 + 330 * (n + 1)]
    assert 0 < unfit.longest_that_fits <= longest
    none = candidate(replace(known, least_bytes=3999), task(fixed_rows=30, effective_batch_size=30), budget(4000))
    assert none.longest_that_fits is None


def test_measured_costs_and_a_lower_cap_cut_anew():
    before = candidate(way_costs(), task(), budget(9300))
    assert cut_anew(before, task(), COSTS, COSTS, cap_bytes=9300) == before
    slow = linear_costs(seconds=100.0)  # one micro-batch a step
    anew = cut_anew(before, task(), COSTS, slow, cap_bytes=4199)
    assert (anew.cap_bytes, anew.cap_binds, anew.widest) == (4199, True, (2, 100))
    assert anew.total_bytes == before.total_bytes - 4200 + 3000
    totals = epoch(task(), slow, cap_bytes=4199)
    assert anew.seconds_per_epoch == pytest.approx(totals.seconds + 2 * 0.5)
    assert not cut_anew(before, task(), COSTS, slow, cap_bytes=5000).cap_binds


def test_an_update_stays_the_total_when_the_cap_is_lowered():
    before = candidate(way_costs(least_bytes=3900), task(), budget(9300))
    assert before.total_bytes == 4700
    assert cut_anew(before, task(), COSTS, COSTS, cap_bytes=3900).total_bytes == 3900 + 500
