"""What scoring takes, from a few traces and by a closed form, and the cut of rows that are scored."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.planning.planned import speed, traces_of

from brim.batching import Costs, Surface
from brim.infer.engines import batching as rows_by_cost
from brim.memory.closed_form import forward_bound
from brim.memory.devices import Budget, device_speed
from brim.planning.costs import ForwardPasses, enough_tokens, forward_costs
from brim.planning.evaluation import WINDOW_ROWS, forward_plan
from brim.planning.words import scoring_lines

MIB = 2**20
LENGTHS = np.array([40] * 20 + [120] * 50 + [150] * 60 + [300] * 25)
WHOLE = {"trainer": {"type": "none", "chunked_loss": False}}


def shapes_of(folder, **given):
    return traces_of(ForwardPasses, folder, "evaluate", **given)


def model_of(shapes, cap_bytes=10**9):
    return forward_costs(shapes, LENGTHS, cap_bytes=cap_bytes, context_length=4096)


def test_between_the_samples_the_surface_is_what_a_trace_finds(tmp_path):
    shapes, _ = shapes_of(tmp_path, device="t4", trainer={"type": "none", "chunked_loss": True})
    costs, useful = model_of(shapes, 40 * MIB)
    assert shapes.num_traced <= 10
    assert costs.static_bytes <= shapes.peak_bytes(1, 2)
    random = np.random.default_rng(0)
    for _ in range(2):
        tokens = int(random.integers(60, 300))
        rows = max(useful // tokens // 2, 1)
        truth = shapes.peak_bytes(rows, tokens)
        assert -0.005 <= float(costs.peak_bytes(rows, tokens)) / truth - 1 <= 0.1, (rows, tokens)
    assert float(shapes.verified(costs, rows=7, tokens=111).peak_bytes(7, 111)) == shapes.peak_bytes(7, 111)
    more = costs.beside(MIB)
    assert float(more.peak_bytes(3, 100)) == float(costs.peak_bytes(3, 100)) + MIB
    assert more.static_bytes == costs.static_bytes + MIB


SDPA, EAGER = ("llama", "qwen3_moe", "phi", "gpt2"), ("gemma2", "mixtral", "gpt_neox")


@pytest.mark.parametrize("family", SDPA + EAGER)
def test_the_closed_form_is_never_below_a_trace(tmp_path, family):
    given = {"family": family, "model_parameters": {"attn_implementation": "eager" if family in EAGER else "sdpa"}}
    shapes, asked = shapes_of(tmp_path, **given, **WHOLE)
    rows, tokens = 6, 60
    added = shapes.peak_bytes(rows, tokens) - shapes.basics["static"]
    bound = rows * tokens * forward_bound(asked.config, asked.folder.config).bytes_of_token(tokens)
    assert added <= bound <= 20 * added


def test_the_closed_form_has_weights_and_time_of_the_traces_order_and_is_none_of_what_is_not_known(tmp_path):
    shapes, asked = shapes_of(tmp_path)
    traced, _ = model_of(shapes)
    bound = forward_bound(asked.config, asked.folder.config)
    weights = bound.weight_bytes
    assert weights == pytest.approx(traced.static_bytes, rel=0.01)
    closed = bound.scoring(LENGTHS, static_bytes=weights, speed=device_speed(shapes.device))
    for rows, tokens in ((1, 40), (8, 150), (20, 300)):
        assert 0.2 <= float(closed.seconds(rows, tokens) / traced.seconds(rows, tokens)) <= 2
        assert closed.peak_bytes(rows, tokens) >= traced.peak_bytes(rows, tokens)
    for config in ({**asked.folder.config, "model_type": "unheard_of"}, {}):
        assert forward_bound(asked.config, config) is None


BUDGET = Budget(device="cpu", limit_bytes=2_000, outside_bytes=300, margin_bytes=100, limit_reason="", margin_reason="")
# 100 bytes of weights and 1 for each token; a second for a batch, and a hundredth for each token.
COSTS = Costs(
    peak=Surface(base=100.0, lengths=(8,), tokens=((8, 80),), values=((108.0, 180.0),)),
    static_bytes=100,
    time=Surface(base=1.0, lengths=(8,), tokens=((8, 80),), values=((1.08, 1.8),)),
)


def plan_of(lengths, *, room_bytes=1_600, useful=10_000, overhead=lambda shapes: 0):
    how = {"useful_tokens": useful, "overhead_bytes": overhead, "reason": "a test"}
    budget = replace(BUDGET, limit_bytes=room_bytes + 400)
    return forward_plan(lengths, costs=COSTS, source="traced", budget=budget, **how)


def test_no_batch_has_more_tokens_than_are_useful_or_fit():
    plan = plan_of([4, 8, 8])
    assert (plan.num_batches, plan.widest, plan.widest_bytes, plan.num_too_long) == (1, (3, 8), 124, 0)
    assert (plan.padding, plan.seconds) == (24 / 20, pytest.approx(1.24))
    assert plan.total_bytes == 424  # 124 allocated, 300 outside
    (short,) = scoring_lines(plan, doing="evaluation", is_part=True)
    assert short == "evaluation: 1 batch of up to 3 × 8 tokens; 424 B of 2.0 KiB; about 1.2 s (estimated) (a test)"
    line = str(next(scoring_lines(plan, doing="evaluation", is_part=False)))
    assert line == "batch: 1 batch of up to 3 × 8 tokens, 20.0% padding (a test)"
    plan = plan_of([10] * 12, useful=40)
    assert (plan.num_batches, plan.widest, plan.cap_bytes) == (3, (4, 10), 140)
    assert plan_of([50, 10, 10], useful=20).cap_bytes == 150  # a row that is longer stands alone
    plan = plan_of([10] * 20, room_bytes=200, overhead=lambda shapes: 30)  # the allocator is left its room
    assert (plan.cap_bytes, plan.widest, plan.total_bytes) == (170, (7, 10), 170 + 30 + 300)
    ample = plan_of([10] * 2, room_bytes=200, overhead=lambda shapes: pytest.fail("not asked"))
    assert ample.total_bytes == 120 + 300
    plan = plan_of([90, 150, 120, 10], room_bytes=200)  # rows that do not fit alone are counted and tried
    assert (plan.num_too_long, plan.widest) == (2, (1, 150))


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


def test_the_useful_batch_is_the_smallest_that_is_nearly_as_good_as_any_and_keeps_a_gpu_busy():
    def enough(seconds, **device):
        return enough_tokens(seconds, speed(**device))

    # A token takes 1 ms, a batch 10 ms: 1% more than the least from 1,000 tokens on, of 2**18 at most: 1.00004 ms.
    assert 900 <= enough(lambda tokens: 0.01 + 0.001 * tokens, is_asynchronous=False) <= 1_250
    # Where nothing is fixed, the smallest; where a batch takes as long whatever is in it, the largest.
    assert enough(lambda tokens: 0.001 * tokens, is_asynchronous=False) == 8
    assert enough(lambda tokens: np.ones(len(tokens)), is_asynchronous=False) == 2**18
    assert enough(lambda tokens: 0.001 * tokens) == 16_384
