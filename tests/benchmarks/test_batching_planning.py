"""The rows that the planning benchmark plans for."""

from __future__ import annotations

import numpy as np
from benchmarks.batching_planning import long_tailed_lengths, rows_of_lengths


def test_the_lengths_have_the_long_tail_of_the_docstring_rows():
    lengths = long_tailed_lengths(100_000)
    assert abs(np.median(lengths) - 139) < 5
    assert abs(np.percentile(lengths, 99) - 1417) < 50
    assert (lengths.min(), lengths.max()) == (8, 1536)


def test_rows_have_the_lengths_that_are_asked_for():
    rows = rows_of_lengths(np.array([3, 1, 5]))
    assert rows.lengths.tolist() == [3, 1, 5]
    assert rows.num_supervised.tolist() == [2, 0, 4]
    assert [len(row.input_ids) for row in rows] == [3, 1, 5]
