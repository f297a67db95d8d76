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
        ({"checkpoints_per_epoch": 3}, [2, 4, 6, 8]),
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
