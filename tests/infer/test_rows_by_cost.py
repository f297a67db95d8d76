"""Rows in the batches of a cutter: each in one call that ended well, under a cap that only falls."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.batching.cost_examples import linear_costs
from tests.infer.test_rows_at_once import Device, rows_of

from brim.batching import ByLength, ByRows
from brim.errors import OutOfMemoryError
from brim.infer import score_rows
from brim.infer.engines import RowsByCost, batching as module, longest_first


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "free_caches", lambda: None)  # a third of a second each


def by_tokens(num_tokens):
    """No batch has more tokens: 1,000 bytes are there, and each token takes 10."""
    return ByLength(costs=linear_costs(), cap_bytes=1_000 + 10 * num_tokens)


def test_rows_are_cut_under_the_cap_and_memory_that_ran_out_lowers_it(quick):
    rows = rows_of([4] * 16)
    device, told = Device(rows, 20), []
    batches = RowsByCost(by_tokens(32), on_smaller=told.append)
    batches.run(rows, longest_first(rows), device, doing="evaluation")
    # 8 rows fail; of the 320 bytes that they add 224 are left, for 5 rows.
    first, *others = (len(tried) for tried in device.tried)
    assert (first, len(others), max(others)) == (8, 4, 5)
    assert device.done == list(range(16))
    (smaller,) = told
    assert (smaller.before, smaller.after, smaller.unit) == (8, 1_224, "bytes")
    assert smaller.record() == {
        "event": "oom", "where": "evaluation", "rows": [10 * row for row in range(8)], "padded_length": 4,
        "cap_bytes": 1_224,
    }  # fmt: skip
    assert str(smaller) == (
        "evaluation: 8 rows of up to 4 tokens ran out of memory; they are run again, and from now on in batches of up "
        "to 1.2 KiB"
    )
    again = Device(rows, 20)
    batches.run(rows, np.arange(6), again, doing="evaluation")
    assert len(again.tried) == 2


def test_a_cutter_by_rows_tells_rows(quick):
    rows, told = rows_of([4] * 4), []
    RowsByCost(ByRows(max_rows=4), on_smaller=told.append).run(rows, np.arange(4), Device(rows, 8), doing="evaluation")
    assert [(each.after, each.unit) for each in told] == [(2, "rows")]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    cap=st.integers(9, 80),
    spare=st.integers(0, 60),
    window=st.integers(1, 12),
)
def test_each_row_is_done_once_the_longest_first(lengths, cap, spare, window):
    rows = rows_of(lengths)
    device = Device(rows, max(lengths) + spare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "free_caches", lambda: None)
        patch.setattr(module, "WINDOW_ROWS", window)
        RowsByCost(by_tokens(cap)).run(rows, longest_first(rows), device, doing="evaluation")
    assert device.done == longest_first(rows).tolist()
    assert all(len(tried) <= window for tried in device.tried)
    assert all(rows.lengths[tried[0]] * len(tried) <= cap for tried in device.tried)


def test_a_row_that_never_fits_is_tried_twice_and_named(quick):
    rows = rows_of([2, 9])
    device = Device(rows, 5)
    with pytest.raises(OutOfMemoryError, match=r"evaluation of a single row runs out of memory \(9 tokens\)") as caught:
        RowsByCost(by_tokens(9)).run(rows, longest_first(rows), device, doing="evaluation")
    assert device.tried == [[1], [1]]
    assert caught.value.problems[0].where == "row 10 (numbered from 0)"


def test_other_errors_pass():
    def work(positions):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        RowsByCost(by_tokens(9)).run(rows_of([1, 1]), np.arange(2), work, doing="evaluation")


def test_scores_do_not_depend_on_the_cut_nor_on_memory_that_ran_out(model, rows, on_cpu, quick):
    def scarce(module, inputs, output):
        if len(output.logits) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    alone = score_rows(model, rows, pad_id=1, batch_rows=1, **on_cpu)
    hook = model.register_forward_hook(scarce)
    try:
        cut = score_rows(model, rows, pad_id=1, batch_rows=RowsByCost(by_tokens(300)), **on_cpu)
    finally:
        hook.remove()
    np.testing.assert_allclose(cut.loss, alone.loss, rtol=1e-5)
    np.testing.assert_array_equal(cut.num_correct, alone.num_correct)
    np.testing.assert_array_equal(cut.num_supervised, alone.num_supervised)
