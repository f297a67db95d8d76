"""Rows of which nobody can say what they take."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.infer.test_rows_at_once import Device, rows_of

from brim.batching.prober import NoPeak
from brim.errors import OutOfMemoryError
from brim.infer.engines import RowsByTrial, batching as module, longest_first


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "free_caches", lambda: None)


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


def test_tokens_double_while_twice_what_was_measured_fits():
    rows = rows_of([4] * 40)
    device = Device(rows, 10_000)
    RowsByTrial(Meter(device, 170)).run(rows, longest_first(rows), device, doing="evaluation")
    # 90% of 170 are 153: after 4, 8 and 16 tokens twice as many fit, after 32 they would make 164.
    assert [len(tried) for tried in device.tried] == [1, 2, 4, 8, 8, 8, 8, 1]
    assert device.done == list(range(40))


def test_tokens_double_up_to_what_is_enough(monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH_TOKENS", 12)
    rows = rows_of([4] * 10)
    device = Device(rows, 10_000)
    RowsByTrial(NoPeak()).run(rows, longest_first(rows), device, doing="evaluation")
    assert [len(tried) for tried in device.tried] == [1, 2, 3, 3, 1]


def test_memory_that_ran_out_ends_the_growth():
    rows, told = rows_of([4] * 16), []
    device = Device(rows, 24)
    batches = RowsByTrial(NoPeak(), on_smaller=told.append)
    batches.run(rows, longest_first(rows), device, doing="evaluation")
    assert [len(tried) for tried in device.tried] == [1, 2, 4, 8, 4, 4, 1]
    assert [(each.before, each.after, each.unit) for each in told] == [(8, 4, "rows")]
    again = Device(rows, 24)
    batches.run(rows, np.arange(8), again, doing="evaluation")
    assert [len(tried) for tried in again.tried] == [4, 4]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), spare=st.integers(0, 60))
def test_each_row_is_done_once_in_order(lengths, spare):
    rows = rows_of(lengths)
    device = Device(rows, max(lengths) + spare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "free_caches", lambda: None)
        RowsByTrial(NoPeak()).run(rows, longest_first(rows), device, doing="evaluation")
    assert device.done == longest_first(rows).tolist()


def test_a_row_that_never_fits_is_tried_twice_and_named():
    rows = rows_of([2, 9])
    device = Device(rows, 5)
    with pytest.raises(OutOfMemoryError, match=r"evaluation of a single row runs out of memory \(9 tokens\)"):
        RowsByTrial(NoPeak()).run(rows, longest_first(rows), device, doing="evaluation")
    assert device.tried == [[1], [1]]
