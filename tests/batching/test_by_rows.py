"""The cutter by rows."""

import json

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from brim.batching import ByRows, CapChange
from brim.batching.microbatch import cut_by_rows


@given(lengths=st.lists(st.integers(1, 100), max_size=60), max_rows=st.integers(1, 70))
def test_it_cuts_as_cut_by_rows_does(lengths, max_rows):
    cuts = ByRows(max_rows=max_rows).cut(lengths)
    expected = [rows.tolist() for rows in cut_by_rows(np.array(lengths, dtype=int), max_rows=max_rows)]
    assert [micro_batch.rows.tolist() for micro_batch in cuts] == expected
    assert [part.padded_length for part in cuts] == [max(lengths[row] for row in part.rows) for part in cuts]
    assert all(part.peak_bytes is None and part.seconds is None for part in cuts)


def test_rows_halve_and_come_back():
    by_rows = ByRows(max_rows=5)
    assert by_rows.lower(by_rows.cut([3] * 9)[0]) == CapChange(before=5, after=2, unit="rows")
    assert [part.num_rows for part in by_rows.cut([3] * 9)] == [2, 2, 2, 2, 1]
    assert by_rows.lower(by_rows.cut([3] * 9)[-1]) is None
    assert by_rows.lower(by_rows.cut([3] * 9)[0]) == CapChange(before=2, after=1, unit="rows")
    assert by_rows.max_rows == 1
    changes = [by_rows.clean_step() for _ in range(150)]
    assert [(number, change.after) for number, change in enumerate(changes) if change] == [(49, 2), (99, 5)]


def test_the_last_smaller_one_may_be_what_fails():
    by_rows = ByRows(max_rows=8)
    assert by_rows.lower(by_rows.cut([9] * 11)[1]) == CapChange(before=8, after=1, unit="rows")


def test_a_restored_cutter_goes_on_the_same():
    one, other = ByRows(max_rows=32), ByRows(max_rows=4)
    one.lower(one.cut([1] * 40)[0])
    for _ in range(70):
        one.clean_step()
    one.lower(one.cut([1] * 40)[0])
    other.restore(json.loads(json.dumps(one.state())))
    assert [one.clean_step() for _ in range(300)] == [other.clean_step() for _ in range(300)]
    assert one.state() == other.state()
