"""Rows that are run together: by a number, under a cap, or by trial; fewer once memory has run out, each in one call."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.batching.cost_examples import linear_costs
from tests.infer.families import rows_of as rows_with_keys

from brim.batching import ByLength, ByRows
from brim.batching.memory.meters import NoPeak
from brim.errors import OutOfMemoryError
from brim.infer.engines import RowsAtOnce, RowsByCost, RowsByTrial, batching as module, longest_first


def rows_of(lengths):
    return rows_with_keys(lengths, first_key=10)


class Device:
    """Holds so many tokens, padding included."""

    def __init__(self, rows, num_tokens):
        self.rows, self.num_tokens = rows, num_tokens
        self.tried, self.done = [], []

    def __call__(self, positions):
        self.tried.append(positions.tolist())
        if len(positions) * self.rows.lengths[positions].max() > self.num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.done += positions.tolist()

    @property
    def sizes(self):
        return [len(tried) for tried in self.tried]


def by_tokens(num_tokens):
    """No batch has more tokens: 1,000 bytes are there, and each token takes 10."""
    return ByLength(costs=linear_costs(), cap_bytes=1_000 + 10 * num_tokens)


class Meter:
    """100 bytes are in use, and a byte for each token of the last call."""

    def __init__(self, device, limit_bytes):
        self.device, self.limit = device, limit_bytes
        self.num_before = 0

    def begin(self):
        self.num_before = len(self.device.tried)

    def peak_bytes(self):
        tried = self.device.tried[self.num_before :]
        return 100 + max((len(each) * int(self.device.rows.lengths[each].max()) for each in tried), default=0)

    def limit_bytes(self):
        return self.limit


def run(batches, lengths, num_tokens, *, order=None):
    """The device after a run of rows of these lengths, the longest first unless an order is given."""
    rows = rows_of(lengths)
    device = Device(rows, num_tokens)
    batches.run(rows, longest_first(rows) if order is None else np.array(order), device, doing="evaluation")
    return device


def test_it_halves_and_goes_on_where_it_was_and_keeps_the_smaller_number():
    told = []
    at_once = RowsAtOnce(6, on_smaller=told.append)
    assert run(at_once, [4] * 6, 9).tried == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [0], [1], [2], [3], [4], [5]]
    assert [(smaller.before, smaller.after) for smaller in told] == [(6, 3), (3, 1)]
    assert told[1].record() == {
        "event": "oom", "where": "evaluation", "rows": [10, 11, 12], "padded_length": 4, "rows_at_once": 1,
    }  # fmt: skip
    assert str(told[0]) == (
        "evaluation: 6 rows of up to 4 tokens ran out of memory; they are run again, and from now on 3 together"
    )
    assert run(at_once, [4] * 6, 9, order=[0, 1]).tried == [[0], [1]]
    assert len(told) == 2
    # What fails is halved, not what was asked for.
    assert run(RowsAtOnce(3), [1, 1, 4, 4], 4, order=range(4)).tried == [[0, 1, 2], [0], [1], [2], [3]]


def test_rows_are_cut_under_the_cap_and_memory_that_ran_out_lowers_it():
    told = []
    batches = RowsByCost(by_tokens(32), on_smaller=told.append)
    device = run(batches, [4] * 16, 20)
    # 8 rows fail; of the 320 bytes that they add 224 are left, for 5 rows.
    assert (device.sizes[0], len(device.sizes), max(device.sizes[1:])) == (8, 5, 5)
    assert device.done == list(range(16))
    (smaller,) = told
    assert (smaller.before, smaller.after, smaller.unit) == (8, 1_224, "bytes")
    assert smaller.record() == {
        "event": "oom", "where": "evaluation", "rows": list(range(10, 18)), "padded_length": 4, "cap_bytes": 1_224,
    }  # fmt: skip
    assert str(smaller).endswith("they are run again, and from now on in batches of up to 1.2 KiB")
    assert len(run(batches, [4] * 16, 20, order=range(6)).tried) == 2
    run(RowsByCost(ByRows(max_rows=4), on_smaller=told.append), [4] * 4, 8)  # a cutter by rows
    assert (told[1].after, told[1].unit) == (2, "rows")


def test_tokens_double_while_they_fit_and_are_not_enough(monkeypatch):
    rows = rows_of([4] * 40)
    device = Device(rows, 10_000)
    RowsByTrial(Meter(device, 170)).run(rows, longest_first(rows), device, doing="evaluation")
    # 90% of 170 are 153: after 4, 8 and 16 tokens twice as many fit, after 32 they would make 164.
    assert device.sizes == [1, 2, 4, 8, 8, 8, 8, 1]
    assert device.done == list(range(40))
    told = []
    batches = RowsByTrial(NoPeak(), on_smaller=told.append)
    assert run(batches, [4] * 16, 24).sizes == [1, 2, 4, 8, 4, 4, 1]
    assert [(each.before, each.after, each.unit) for each in told] == [(8, 4, "rows")]
    assert run(batches, [4] * 16, 24, order=range(8)).sizes == [4, 4]
    monkeypatch.setattr(module, "_ENOUGH_TOKENS", 12)
    assert run(RowsByTrial(NoPeak()), [4] * 10, 10_000).sizes == [1, 2, 3, 3, 1]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    num_rows=st.integers(1, 25),
    cap=st.integers(9, 80),
    spare=st.integers(0, 60),
    window=st.integers(1, 12),
)
def test_each_row_is_done_once_the_longest_first(lengths, num_rows, cap, spare, window):
    order = longest_first(rows_of(lengths))
    assert np.array(lengths)[order].tolist() == sorted(lengths, reverse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_ROWS", window)
        for batches in (RowsAtOnce(num_rows), RowsByCost(by_tokens(cap)), RowsByTrial(NoPeak())):
            device = run(batches, lengths, max(lengths) + spare)
            assert device.done == order.tolist()
            if isinstance(batches, RowsByCost):
                assert max(device.sizes) <= window
                assert all(lengths[tried[0]] * len(tried) <= cap for tried in device.tried)


@pytest.mark.parametrize("batches", [RowsAtOnce(1), RowsByCost(by_tokens(9)), RowsByTrial(NoPeak())], ids=type)
def test_a_row_that_never_fits_is_tried_twice_and_named_and_other_errors_pass(batches):
    rows = rows_of([2, 9])
    device = Device(rows, 5)
    with pytest.raises(OutOfMemoryError) as caught:
        batches.run(rows, longest_first(rows), device, doing="generation")
    assert device.tried == [[1], [1]]
    (problem,) = caught.value.problems
    assert problem.what == "generation of a single row runs out of memory (9 tokens)"
    assert problem.where == "row 11 (numbered from 0)"
    assert "generation.max_new_tokens" in problem.fix

    def work(positions):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        batches.run(rows, np.arange(2), work, doing="evaluation")
