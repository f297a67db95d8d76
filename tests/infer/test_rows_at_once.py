"""Rows that are run together: fewer once memory has run out, each in one call that ended well."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from brim.data.tokens import TokenRow, TokenRows
from brim.errors import OutOfMemoryError
from brim.infer.engines import RowsAtOnce, batching as module, longest_first, rows_at_once


def rows_of(lengths):
    return TokenRows.from_rows(
        TokenRow(key=10 * number, input_ids=np.ones(length, dtype=np.int32), supervised=np.ones(length, dtype=np.bool_))
        for number, length in enumerate(lengths)
    )


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


def test_it_halves_and_goes_on_where_it_was_and_keeps_the_smaller_number():
    rows = rows_of([4, 4, 4, 4, 4, 4])
    told = []
    at_once = RowsAtOnce(6, on_smaller=told.append)
    device = Device(rows, 9)
    at_once.run(rows, np.arange(6), device, doing="evaluation")
    assert device.tried == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [0], [1], [2], [3], [4], [5]]
    assert [(smaller.before, smaller.after) for smaller in told] == [(6, 3), (3, 1)]
    assert told[1].record() == {
        "event": "oom", "where": "evaluation", "rows": [0, 10, 20], "padded_length": 4, "rows_at_once": 1,
    }  # fmt: skip
    assert str(told[0]) == (
        "evaluation: 6 rows of up to 4 tokens ran out of memory; they are run again, and from now on 3 together"
    )
    again = Device(rows, 9)
    at_once.run(rows, np.arange(2), again, doing="evaluation")
    assert again.tried == [[0], [1]]
    assert len(told) == 2


def test_what_fails_is_halved_not_what_was_asked_for():
    rows = rows_of([1, 1, 4, 4])
    device = Device(rows, 4)
    RowsAtOnce(3).run(rows, np.array([0, 1, 2, 3]), device, doing="evaluation")
    assert device.tried == [[0, 1, 2], [0], [1], [2], [3]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20), num_rows=st.integers(1, 25), spare=st.integers(0, 60)
)
def test_each_row_is_done_once_in_order(lengths, num_rows, spare):
    rows = rows_of(lengths)
    device = Device(rows, max(lengths) + spare)
    order = longest_first(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "free_caches", lambda: None)  # a third of a second each
        RowsAtOnce(num_rows).run(rows, order, device, doing="generation")
    assert device.done == order.tolist()
    assert rows.lengths[order].tolist() == sorted(lengths, reverse=True)


def test_a_row_that_never_fits_is_tried_twice_and_named():
    rows = rows_of([2, 9])
    device = Device(rows, 5)
    with pytest.raises(OutOfMemoryError) as caught:
        RowsAtOnce(1).run(rows, np.arange(2), device, doing="generation")
    assert device.tried == [[0], [1], [1]]
    problem = caught.value.problems[0]
    assert problem.what == "generation of a single row runs out of memory (9 tokens)"
    assert problem.where == "row 10 (numbered from 0)"
    assert "generation.max_new_tokens" in problem.fix


def test_other_errors_pass_and_so_does_what_the_listener_raises():
    def work(positions):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        RowsAtOnce(2).run(rows_of([1, 1]), np.arange(2), work, doing="evaluation")

    def refuse(smaller):
        raise KeyError(smaller.after)

    rows = rows_of([4, 4])
    with pytest.raises(KeyError, match="1"):
        RowsAtOnce(2, on_smaller=refuse).run(rows, np.arange(2), Device(rows, 4), doing="evaluation")


def test_a_number_is_for_one_piece_of_work():
    shared = RowsAtOnce(3)
    assert rows_at_once(shared) is shared
    assert rows_at_once(3).num_rows == 3


def test_what_fewer_rows_never_cure_is_raised_as_it_is(monkeypatch):
    """oneDNN's message has several causes: under a limit fewer rows are tried, and at the last it was not memory."""
    monkeypatch.setattr("brim.batching.oom._host_room_bytes", lambda: 80 << 30)
    tried = []

    def work(positions):
        tried.append(len(positions))
        raise RuntimeError("could not create a primitive")

    with pytest.raises(RuntimeError, match=r"^could not create a primitive$"):
        RowsAtOnce(8).run(rows_of([5] * 8), np.arange(8), work, doing="evaluation")
    assert tried == [8, 4, 2, 1, 1]
