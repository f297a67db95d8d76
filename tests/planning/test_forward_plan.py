"""The cut of rows that are scored: caps, windows, what is useful."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.batching import Costs, Surface
from brim.infer.engines import batching as rows_by_cost
from brim.memory import Budget
from brim.planning.costs.forward import useful_tokens
from brim.planning.evaluation import WINDOW_ROWS, forward_plan

BUDGET = Budget(device="cpu", limit_bytes=2_000, outside_bytes=300, margin_bytes=100, limit_reason="", margin_reason="")
# 100 bytes of weights and 1 for each token; a second for a batch, and a hundredth for each token.
COSTS = Costs(
    peak=Surface(base=100.0, lengths=(8,), tokens=((8, 80),), values=((108.0, 180.0),)),
    static_bytes=100,
    time=Surface(base=1.0, lengths=(8,), tokens=((8, 80),), values=((1.08, 1.8),)),
)


def plan_of(lengths, *, room_bytes=1_600, useful=10_000, overhead=lambda shapes: 0):
    return forward_plan(
        lengths,
        costs=COSTS,
        source="traced",
        budget=BUDGET,
        room_bytes=room_bytes,
        useful_tokens=useful,
        overhead_bytes=overhead,
        reason="a test",
    )


def test_rows_that_fit_together_are_one_batch():
    plan = plan_of([4, 8, 8])
    assert (plan.num_batches, plan.widest, plan.widest_bytes) == (1, (3, 8), 124)
    assert plan.padding == 24 / 20
    assert plan.seconds == pytest.approx(1.24)
    # 124 allocated, 300 outside.
    assert plan.total_bytes == 424
    assert plan.num_too_long == 0
    assert str(plan) == ("1 batch of up to 3 × 8 tokens, 20.0% padding; 424 B of 2.0 KiB; about 1.2 s (a test)")


def test_no_batch_has_more_tokens_than_are_useful():
    plan = plan_of([10] * 12, useful=40)
    assert (plan.num_batches, plan.widest, plan.cap_bytes) == (3, (4, 10), 140)


def test_a_row_that_is_longer_than_useful_stands_alone():
    assert plan_of([50, 10, 10], useful=20).cap_bytes == 150


def test_the_allocator_is_left_its_room():
    plan = plan_of([10] * 20, room_bytes=200, overhead=lambda shapes: 30)
    assert (plan.cap_bytes, plan.widest) == (170, (7, 10))
    assert plan.total_bytes == 170 + 30 + 1_900 - 200
    ample = plan_of([10] * 2, room_bytes=200, overhead=lambda shapes: pytest.fail("not asked"))
    assert ample.total_bytes == 120 + 1_900 - 200


def test_rows_that_do_not_fit_alone_are_counted_and_tried():
    plan = plan_of([90, 150, 120, 10], room_bytes=200)
    assert plan.num_too_long == 2
    assert plan.widest == (1, 150)


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=60), room=st.integers(191, 400))
def test_the_plan_tells_of_the_very_cut_that_is_run(lengths, room):
    plan = plan_of(lengths, room_bytes=room)
    batches = plan.cutter().cut(lengths)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(lengths)))
    assert all(batch.peak_bytes <= plan.cap_bytes <= room for batch in batches)
    assert len(batches) == plan.num_batches
    assert max(batch.peak_bytes for batch in batches) == plan.widest_bytes
    assert sum(batch.seconds for batch in batches) == pytest.approx(plan.seconds)


def test_windows_are_those_that_are_run():
    assert rows_by_cost.WINDOW_ROWS == WINDOW_ROWS
    plan = plan_of(np.full(2 * WINDOW_ROWS, 1), room_bytes=100_000, useful=50_000)
    assert (plan.num_batches, plan.widest) == (2, (WINDOW_ROWS, 1))


def test_the_useful_batch_is_the_smallest_that_is_nearly_as_good_as_any():
    # A token takes 1 ms, a batch 10 ms: 1% more than the least from 1,000 tokens on, of 100,000 at most: 1.0001 ms.
    found = useful_tokens(lambda tokens: 0.01 + 0.001 * tokens, least=1, most=100_000)
    assert 900 <= found <= 1_250
    # Where nothing is fixed, the smallest; where a batch takes as long whatever is in it, the largest.
    assert useful_tokens(lambda tokens: 0.001 * tokens, least=8, most=100_000) == 8
    assert useful_tokens(lambda tokens: np.ones(len(tokens)), least=8, most=100_000) == 100_000
