"""Rows of batches as people's own loops have them."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from brim.batching.adaptive_step import count_rows, take_rows


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_rows_are_taken_in_the_order_that_is_asked_for(rows):
    batch = {
        "tensor": torch.arange(6),
        "array": np.arange(6),
        "names": list("abcdef"),
        "pair": (torch.arange(6) + 10, 7),
    }
    taken = take_rows(batch, np.array(rows), samples=False)
    assert taken["tensor"].tolist() == rows
    assert taken["array"].tolist() == rows
    assert taken["names"] == ["abcdef"[row] for row in rows]
    assert taken["pair"][0].tolist() == [row + 10 for row in rows]
    assert taken["pair"][1] == 7
    assert take_rows(list(range(6)), np.array(rows), samples=True) == rows


@pytest.mark.parametrize("rows", [[0, 2, 1, 3], [3, 2, 1, 0], [1, 1], [4]])
def test_rows_that_look_like_neighbours(rows):
    assert take_rows(torch.arange(6), np.array(rows), samples=False).tolist() == rows


@pytest.mark.parametrize(
    ("batch", "samples", "expected"),
    [
        (torch.zeros(3, 2), False, 3),
        ((torch.zeros(3, 2), torch.tensor(1.0), None, "text"), False, 3),
        ({"x": [torch.zeros(4), {"y": np.zeros((4, 2))}], "names": ["a", "b", "c", "d"]}, False, 4),
        ([torch.zeros(9), torch.zeros(2)], True, 2),
        (({"x": 1}, {"x": 2}, {"x": 3}), True, 3),
    ],
)
def test_rows_are_counted(batch, samples, expected):
    assert count_rows(batch, samples=samples) == expected
