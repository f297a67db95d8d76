"""Cutting an effective batch."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from brim.batching.microbatch import cut_by_rows


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), max_rows=st.integers(1, 70))
def test_every_row_once_longest_first_and_no_cut_too_wide(lengths, max_rows):
    cuts = [cut.tolist() for cut in cut_by_rows(np.array(lengths), max_rows=max_rows)]
    order = [row for cut in cuts for row in cut]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    assert all(len(cut) == max_rows for cut in cuts[:-1])
    assert 1 <= len(cuts[-1]) <= max_rows
