"""Every row once an epoch, whatever the batch sizes."""

import numpy as np
from hypothesis import given, strategies as st

from brim.data.tokens import random_order, rows_of_step


@given(
    num_rows=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=40),
)
def test_each_epoch_holds_every_row_once_and_no_batch_crosses_its_end(num_rows, seed, sizes):
    consumed, epochs = 0, {}
    for size in sizes:
        epoch, rows = rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=consumed, size=size)
        assert 1 <= len(rows) <= size
        assert epoch == consumed // num_rows == (consumed + len(rows) - 1) // num_rows
        epochs.setdefault(epoch, []).extend(rows.tolist())
        consumed += len(rows)
    for epoch, rows in epochs.items():
        assert len(set(rows)) == len(rows)
        if epoch < max(epochs):
            assert sorted(rows) == list(range(num_rows))


@given(num_rows=st.integers(1, 60), first=st.integers(1, 60), size=st.integers(1, 60))
def test_the_order_does_not_depend_on_how_it_was_consumed(num_rows, first, size):
    whole = rows_of_step(num_rows=num_rows, seed=7, consumed_samples=0, size=num_rows)[1]
    start = first % num_rows
    _, rows = rows_of_step(num_rows=num_rows, seed=7, consumed_samples=start, size=size)
    assert rows.tolist() == whole[start : start + size].tolist()


def test_the_last_batch_of_an_epoch_is_partial():
    sizes, epochs, consumed = [], [], 0
    for _ in range(4):
        epoch, rows = rows_of_step(num_rows=10, seed=1, consumed_samples=consumed, size=4)
        sizes.append(len(rows))
        epochs.append(epoch)
        consumed += len(rows)
    assert sizes == [4, 4, 2, 4]
    assert epochs == [0, 0, 0, 1]


def test_the_order_is_the_same_on_every_machine_and_version():
    assert rows_of_step(num_rows=8, seed=42, consumed_samples=0, size=8)[1].tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert rows_of_step(num_rows=8, seed=42, consumed_samples=8, size=8)[1].tolist() == [1, 2, 5, 3, 6, 0, 4, 7]


def test_random_order_is_a_permutation_of_its_entropy():
    assert sorted(random_order(1000, 3, 5).tolist()) == list(range(1000))
    assert random_order(1000, 3, 5).tolist() != random_order(1000, 5, 3).tolist()
    assert random_order(0, 1).tolist() == []
    # A shuffle that left most rows near their place would still be a permutation.
    assert 300 < np.abs(random_order(1000, 1) - np.arange(1000)).mean() < 370
