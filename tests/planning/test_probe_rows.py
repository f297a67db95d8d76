"""Real rows stand for a shape: the longest that it has room for."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from brim.planning import rows_of_shape

LENGTHS = np.array([5, 9, 3, 9, 7, 2])


def test_the_longest_rows_that_are_short_enough_are_taken():
    assert rows_of_shape(LENGTHS, rows=2, tokens=9).tolist() == [1, 3]
    assert rows_of_shape(LENGTHS, rows=3, tokens=8).tolist() == [4, 0, 2]


def test_rows_are_taken_again_where_there_are_too_few():
    assert rows_of_shape(LENGTHS, rows=5, tokens=3).tolist() == [2, 5, 2, 5, 2]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 40), st.data())
def test_a_shape_of_the_data_is_met_exactly(lengths, rows, data):
    tokens = data.draw(st.sampled_from(lengths))
    taken = rows_of_shape(np.array(lengths), rows=rows, tokens=tokens)
    short_enough = [length for length in lengths if length <= tokens]
    assert len(taken) == rows
    assert max(lengths[row] for row in taken) == tokens
    distinct = sorted(lengths[row] for row in set(taken.tolist()))
    assert distinct == sorted(short_enough)[-rows:]
