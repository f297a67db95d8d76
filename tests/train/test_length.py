"""How long a run is."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from brim.train.length import run_length


def test_an_epoch_ends_with_the_rows_that_are_left():
    length = run_length(num_rows=100, effective_batch_size=32, epochs=2, train_steps=None)
    assert length.steps_per_epoch == 4
    assert length.total_steps == 8
    assert length.total_samples == 200


def test_train_steps_win_over_epochs():
    length = run_length(num_rows=100, effective_batch_size=32, epochs=2, train_steps=5)
    assert length.total_steps == 5
    assert length.total_samples == 100 + 32


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [4, 8]),
        ({"steps_per_checkpoint": 3}, [3, 6, 8]),
        ({"checkpoints_per_epoch": 2}, [2, 4, 6, 8]),
        ({"checkpoints_per_epoch": 3}, [2, 3, 4, 6, 7, 8]),
        ({"checkpoints_per_epoch": 4}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"checkpoints_per_epoch": 9}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_checkpoints_come_where_they_were_asked_for_and_at_the_end(keys, expected):
    length = run_length(num_rows=100, effective_batch_size=32, epochs=2, train_steps=None, **keys)
    assert [step for step in range(1, 9) if length.is_checkpoint(step)] == expected


@given(num_rows=st.integers(1, 500), size=st.integers(1, 600), steps=st.integers(1, 50))
def test_total_samples_are_those_that_the_steps_take(num_rows, size, steps):
    length = run_length(num_rows=num_rows, effective_batch_size=size, epochs=1, train_steps=steps)
    consumed = 0
    for _ in range(steps):
        consumed += min(size, num_rows - consumed % num_rows)
    assert length.total_samples == consumed


@given(num_rows=st.integers(1, 300), size=st.integers(1, 50), number=st.integers(1, 40))
def test_each_epoch_has_its_number_of_checkpoints_evenly_spread_and_one_at_its_end(num_rows, size, number):
    length = run_length(
        num_rows=num_rows, effective_batch_size=size, epochs=3, train_steps=None, checkpoints_per_epoch=number
    )
    steps = length.steps_per_epoch
    at = [step for step in range(1, 3 * steps + 1) if length.is_checkpoint(step)]
    assert len(at) == 3 * min(number, steps)
    assert {steps, 2 * steps, 3 * steps} <= set(at)
    gaps = {after - before for before, after in zip([0, *at], at, strict=False)}
    assert max(gaps) - min(gaps) <= 1


def test_a_run_that_ends_within_an_epoch_ends_with_a_checkpoint():
    length = run_length(num_rows=100, effective_batch_size=10, epochs=9, train_steps=13, checkpoints_per_epoch=2)
    assert [step for step in range(1, 14) if length.is_checkpoint(step)] == [5, 10, 13]
