"""Rows are known by a number or by a column, and what cannot tell rows apart is refused with its places."""

import numpy as np
import pytest

import brim
from brim.data.read import read
from brim.workflows.prediction.prompts import row_keys

ROWS = np.array([0, 2, 3], dtype=np.int64)


def test_without_a_column_the_number_is_the_key():
    keys = row_keys(read({"a": [1, 2, 3, 4]}), ROWS, column=None)
    assert (keys.dtype, keys.tolist()) == (np.uint64, [0, 2, 3])


def test_a_value_has_one_key_wherever_it_stands_and_however_many_rows_there_are():
    many = [f"id {number}" for number in range(3000)]
    keys = row_keys(read({"id": many}), np.arange(3000), column="id")
    backwards = row_keys(read({"id": many[::-1]}), np.arange(3000), column="id")
    assert keys.tolist() == backwards.tolist()[::-1]
    assert len(set(keys.tolist())) == 3000
    assert row_keys(read({"id": [7]}), np.arange(1), column="id") == row_keys(
        read({"id": ["7"]}), np.arange(1), column="id"
    )


def test_values_that_are_missing_or_shared_are_counted_and_located():
    source = read({"id": ["a", "b", "a", None, "", "b", "b", "c"]})
    with pytest.raises(brim.DataError) as refused:
        row_keys(source, np.arange(8), column="id")
    missing, shared = refused.value.problems
    assert missing.what == "2 rows have no value in `id`, by which rows are to be known"
    assert missing.where == "the given columns, row 3, the given columns, row 4"
    assert shared.what == (
        "3 rows have a value in `id` that an earlier row has, too: 'a' stands in the given columns, row 0 first"
    )
    assert shared.where == "the given columns, row 2, the given columns, row 5, the given columns, row 6"


def test_rows_that_are_not_asked_for_may_share_a_value():
    assert len(row_keys(read({"id": ["a", "a", "b", "c"]}), ROWS, column="id")) == 3


@pytest.mark.parametrize(
    ("column", "message"),
    [("no", r"there is no column `no` to know rows by\n  expected: `id`"), ("id", "by which rows cannot be known")],
)
def test_a_column_that_cannot_be_a_key_is_refused(column, message):
    with pytest.raises(brim.InputError, match=message):
        row_keys(read({"id": [["a"], ["b"]]}), np.arange(2), column=column)
