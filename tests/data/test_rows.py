"""Token rows over an Arrow table."""

import numpy as np
import pyarrow as pa
from hypothesis import given, strategies as st

from brim.data.tokens import SCHEMA, TokenRow, TokenRows, batch_of


def row(key, ids, supervised):
    return TokenRow(
        key=key, input_ids=np.asarray(ids, dtype=np.int32), supervised=np.asarray(supervised, dtype=np.bool_)
    )


@st.composite
def any_rows(draw):
    rows = []
    for key in range(draw(st.integers(0, 12))):
        marks = draw(st.lists(st.booleans(), max_size=9))
        rows.append(row(key * 3, draw(st.lists(st.integers(0, 50), min_size=len(marks), max_size=len(marks))), marks))
    return rows


def as_tuples(rows):
    return [(each.key, each.input_ids.tolist(), each.supervised.tolist()) for each in rows]


@given(rows=any_rows(), cut=st.integers(0, 12), data=st.data())
def test_rows_and_their_figures_survive_any_chunking_and_order(rows, cut, data):
    table = pa.Table.from_batches([batch_of(rows[:cut]), batch_of(rows[cut:])], schema=SCHEMA)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    taken = TokenRows(table).take(indices)
    expected = [rows[index] for index in indices]
    assert as_tuples(taken) == as_tuples(expected)
    assert taken.keys.tolist() == [each.key for each in expected]
    assert taken.lengths.tolist() == [len(each.input_ids) for each in expected]
    assert taken.num_supervised.tolist() == [each.num_supervised for each in expected]
    assert taken.num_supervised.tolist() == [sum(each.supervised.tolist()[1:]) for each in expected]
    assert taken.num_prompt_tokens.tolist() == [each.num_prompt_tokens for each in expected]
    assert as_tuples(taken.prompts()) == as_tuples(each.prompt() for each in expected)


def test_the_prompt_is_what_stands_before_the_first_target():
    rows = TokenRows.from_rows(
        [row(5, [7, 8, 9], [False, False, True]), row(6, [4], [True]), row(7, [3, 2], [False] * 2)]
    )
    assert as_tuples(rows.prompts()) == [(5, [7, 8], [False, False]), (6, [], []), (7, [3, 2], [False, False])]
    assert rows.num_supervised.tolist() == [1, 0, 0]


def test_rows_know_their_types_and_slices():
    rows = TokenRows.from_rows([row(number, [number] * number, [True] * number) for number in range(5)])
    assert rows[4].input_ids.dtype == np.int32
    assert rows[4].supervised.dtype == np.bool_
    assert rows.keys.dtype == rows.lengths.dtype == rows.num_supervised.dtype == np.int64
    assert rows[1:3].keys.tolist() == [1, 2]
    assert rows[-1].key == 4
    assert rows.take([3, 1]).take([1]).keys.tolist() == [1]
    assert len(TokenRows.from_rows([])) == 0
