"""What all effective batches of a data set come to."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import costs, linear_costs, rising_surfaces

from brim.batching import cut_totals, cut_totals_by_rows, partition as totals
from brim.batching.microbatch import cut, cut_by_rows
from brim.batching.partition import MOST_ROWS_FOR_ALL_PAIRS, RowTooLongError


def one_by_one(lengths, batch_size, cut_one):
    """(rows, padded length) of all micro-batches, how often each."""
    lengths = np.array(lengths)
    shapes = Counter()
    for start in range(0, len(lengths), batch_size):
        some = lengths[start : start + batch_size]
        shapes.update((len(rows), int(some[rows].max())) for rows in cut_one(some))
    return shapes


def check(found, shapes, lengths, batch_size, costs):
    assert found.num_steps == found.num_steps_looked_at == -(-len(lengths) // batch_size)
    assert found.num_micro_batches == sum(shapes.values())
    assert found.padded_tokens == sum(count * rows * padded for (rows, padded), count in shapes.items())
    assert found.real_tokens == sum(lengths)
    seconds = sum(count * float(costs.seconds(*shape)) for shape, count in shapes.items())
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    peaks = {shape: int(np.ceil(costs.peak_bytes(*shape))) for shape in shapes}
    assert found.widest.peak_bytes == max(peaks.values())
    undominated = {a for a in shapes if not any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in shapes)}
    chosen = {(shape.rows, shape.padded_length) for shape in found.shapes}
    widest = (found.widest.rows, found.widest.padded_length)
    assert chosen <= undominated | {widest}
    assert len(chosen) == len(found.shapes) <= 16
    assert len(chosen) == 16 or chosen == undominated | {widest}
    assert found.shapes[0] == found.widest
    for shape in found.shapes:
        key = (shape.rows, shape.padded_length)
        assert (shape.count, shape.peak_bytes, shape.seconds) == (shapes[key], peaks[key], float(costs.seconds(*key)))
    assert [shape.peak_bytes for shape in found.shapes] == sorted((s.peak_bytes for s in found.shapes), reverse=True)


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=90),
    batch_size=st.integers(1, 40),
    costs=costs(time=rising_surfaces()),
    share=st.floats(0, 1),
    most_rows=st.none() | st.integers(1, 9),
    largest=st.booleans(),
)
def test_they_are_those_of_cutting_batch_by_batch(lengths, batch_size, costs, share, most_rows, largest):
    alone = float(costs.peak_bytes(1, np.array(lengths)).max())
    together = float(costs.peak_bytes(batch_size, max(lengths)))
    settings = {
        "costs": costs,
        "cap_bytes": int(np.ceil(alone + share * max(together - alone, 0))),
        "most_rows": most_rows,
        "largest": largest,
    }
    shapes = one_by_one(lengths, batch_size, lambda some: [part.rows for part in cut(some, **settings)])
    check(cut_totals(lengths, batch_size, **settings), shapes, lengths, batch_size, costs)


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=90),
    batch_size=st.integers(1, 40),
    costs=costs(),
    max_rows=st.integers(1, 50),
)
def test_micro_batches_of_so_many_rows(lengths, batch_size, costs, max_rows):
    shapes = one_by_one(lengths, batch_size, lambda some: cut_by_rows(some, max_rows=max_rows))
    found = cut_totals_by_rows(lengths, batch_size, costs=costs, max_rows=max_rows)
    check(found, shapes, lengths, batch_size, costs)


@pytest.mark.parametrize("largest", [False, True])
def test_blocks_and_tables_of_any_size_come_to_the_same(monkeypatch, largest):
    lengths = np.random.default_rng(1).integers(1, 300, 1000)
    costs = linear_costs(seconds=0.7)
    settings = {"costs": costs, "cap_bytes": 1000 + 10 * 2000, "largest": largest}
    whole = cut_totals(lengths, 24, **settings)
    monkeypatch.setattr(totals, "_ENTRIES_AT_ONCE", 100)
    monkeypatch.setattr(totals, "_ENTRIES_OF_PRICES", 10)
    assert cut_totals(lengths, 24, **settings) == whole


def test_large_batches_are_cut_one_by_one():
    lengths = np.random.default_rng(2).integers(1, 300, 2 * MOST_ROWS_FOR_ALL_PAIRS + 100)
    batch_size = MOST_ROWS_FOR_ALL_PAIRS + 50
    settings = {"costs": linear_costs(seconds=0.7), "cap_bytes": 1000 + 10 * 2000}
    shapes = one_by_one(lengths, batch_size, lambda some: [part.rows for part in cut(some, **settings)])
    check(cut_totals(lengths, batch_size, **settings), shapes, lengths.tolist(), batch_size, settings["costs"])


@pytest.mark.parametrize(
    ("limit", "value", "batch_size"),
    [("_MOST_PAIRS", 10 * 20**2, 20), ("_MOST_ROWS_IN_QUEUES", 10 * (MOST_ROWS_FOR_ALL_PAIRS + 8), 520)],
)
def test_evenly_chosen_steps_stand_for_all(monkeypatch, limit, value, batch_size):
    # Each step is one of three kinds in turn; 10 of 30 full ones are looked at, every third: the kind of the first.
    kinds = [np.full(batch_size, length) for length in (10, 30, 60)]
    lengths = np.concatenate([*kinds * 10, [200]])
    monkeypatch.setattr(totals, limit, value)
    costs = linear_costs(seconds=0.0)
    found = cut_totals(lengths, batch_size, costs=costs, cap_bytes=10_000, largest=True, most_rows=batch_size // 2)
    assert (found.num_steps, found.num_steps_looked_at) == (31, 11)
    assert found.real_tokens == lengths.sum()
    first = cut_totals(kinds[0], batch_size, costs=costs, cap_bytes=10_000, largest=True, most_rows=batch_size // 2)
    assert found.num_micro_batches == 30 * first.num_micro_batches + 1
    assert found.padded_tokens == 30 * batch_size * 10 + 200
    assert found.seconds == pytest.approx(30 * first.seconds + 200 * 0.01)


def test_a_row_over_the_cap_alone():
    lengths = [10, 300, 20, 310, 310, 5]
    settings = {"costs": linear_costs(), "cap_bytes": 1000 + 10 * 100}
    with pytest.raises(RowTooLongError, match="row 3 of 310 tokens takes 4100 bytes alone, the cap is 2000"):
        cut_totals(lengths, 2, **settings)
    shapes = one_by_one(
        lengths, 2, lambda some: [part.rows for part in cut(some, **settings, lone_rows_may_exceed=True)]
    )
    check(cut_totals(lengths, 2, **settings, lone_rows_may_exceed=True), shapes, lengths, 2, settings["costs"])
    assert (1, 310) in shapes


def test_fewer_rows_than_an_effective_batch():
    found = cut_totals([7, 7, 7], 32, costs=linear_costs(), cap_bytes=10_000)
    assert (found.num_steps, found.num_micro_batches, found.widest.rows, found.widest.count) == (1, 1, 3, 1)
