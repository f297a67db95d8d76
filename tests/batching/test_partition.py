"""Costs by shape, what fits under a cap, both ways of dynamic programming, and what all effective batches come to."""

from collections import Counter
from math import inf

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.batching.cost_examples import (
    LENGTHS,
    TOKENS,
    convex_surfaces,
    costs,
    cut,
    jagged_surfaces,
    linear_costs,
    rising_surfaces,
    surface,
)

from brim.batching import Costs, Surface, cut_totals, partition as totals
from brim.batching.microbatch import cut_by_rows
from brim.batching.partition import (
    MOST_ROWS_FOR_ALL_PAIRS,
    RowTooLongError,
    Terms,
    cheapest_by_all_pairs,
    cheapest_by_queue,
    line_prices,
    price_table,
)

TWO = Surface(base=10.0, lengths=(10, 30), tokens=((20, 100), (60, 90)), values=((30.0, 190.0), (130.0, 250.0)))


def test_a_surface_by_hand():
    values = [
        (2, 10, 30),  # samples
        (10, 10, 190),
        (3, 30, 250),
        (1, 10, 20),  # between no tokens and the first
        (1, 30, 70),
        (6, 10, 110),  # between two
        (11, 10, 210),  # beyond the last: its slope goes on
        (5, 30, 490),
        (3, 20, (110 + 130) / 2),  # 60 tokens: between the two lengths
        (4, 5, 30),  # shorter than any: the shortest's line
        (2, 45, 250),  # longer than any: the longest's
    ]
    for rows, length, value in values:
        assert TWO(rows, length) == pytest.approx(value, rel=1e-15), (rows, length)
    assert TWO.kinks.tolist() == [20, 60, 90, 100]
    assert surface(0.0, [[1] * 4] * len(LENGTHS)).kinks.tolist() == list(TOKENS)
    scaled = Costs(peak=TWO, static_bytes=6, time=TWO, scale=1.5)  # what was measured scales what the shape adds
    assert scaled.peak_bytes([2, 10], 10).tolist() == [6 + 1.5 * 24, 6 + 1.5 * 184]
    assert scaled.seconds([2, 10], 10).tolist() == [30, 190]


@given(
    surface=jagged_surfaces(),
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=20),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20),
)
def test_a_table_is_the_same_as_one_call_for_each(surface, rows, lengths):
    table = surface(np.array(rows), np.array(lengths)[:, None])
    assert table.shape == (len(lengths), len(rows))
    for line, length in zip(table, lengths, strict=True):
        assert line.tolist() == [float(surface(number, length)) for number in rows]


@given(surface=jagged_surfaces(), length=st.integers(1, 150), rows=st.integers(1, 300))
def test_straight_between_kinks(surface, length, rows):
    low, high = rows * length, (rows + 2) * length
    if not np.any((surface.kinks > low) & (surface.kinks < high)):
        middle = float(surface(rows, length) + surface(rows + 2, length)) / 2
        assert float(surface(rows + 1, length)) == pytest.approx(middle, rel=1e-9)


@given(
    costs=costs(peak=jagged_surfaces()),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    most=st.integers(1, 300),
    cap_bytes=st.integers(0, 4000),
    most_seconds=st.floats(0, 4000) | st.just(inf),
)
def test_the_rows_below_the_first_number_that_is_over_the_cap(costs, lengths, most, cap_bytes, most_seconds):
    shapes = np.arange(1, most + 1), np.array(lengths)[:, None]
    over = (costs.peak_bytes(*shapes) > cap_bytes) | (costs.seconds(*shapes) > most_seconds)
    expected = [line.tolist().index(True) if line.any() else most for line in over]
    limits = {"cap_bytes": cap_bytes, "most_seconds": most_seconds}
    assert costs.rows_that_fit(lengths, **limits, most=most).tolist() == expected


def test_what_fits_by_hand():
    fit = linear_costs(scale=2.0).rows_that_fit([1, 50, 70, 150, 151], cap_bytes=1000 + 20 * 150, most=1000)
    assert fit.tolist() == [150, 3, 2, 1, 0]
    for cap_bytes, tokens in [(999, 0), (1009, 0), (1010, 1), (51_009, 5000), (10**9, 1 << 20)]:
        assert linear_costs().longest_row_that_fits(cap_bytes) == tokens
    assert linear_costs().longest_row_that_fits(1000 + 10 * 3 * 50 + 29, rows=3) == 50
    assert linear_costs().longest_row_that_fits(10**9, up_to=4097) == 4097
    assert linear_costs().longest_row_that_fits(1000 + 10 * 4097 - 1, up_to=4097) == 4096
    rise_and_fall = surface(0.0, [[10, -9, 0, 1]] * 3)
    costs = Costs(peak=rise_and_fall, static_bytes=0, time=rise_and_fall)
    assert costs.peak_bytes(1, 100) == 320 - 9 * 68 < 200
    assert costs.longest_row_that_fits(200) == 20  # a row is too long where a shorter one is


def sizes(begins):
    end, found = len(begins) - 1, []
    while end:
        found.append((int(begins[end]), end))
        end = int(begins[end])
    return found[::-1]


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=150),
    costs=costs(peak=convex_surfaces()),
    share=st.floats(0, 1) | st.just(2.0),
    most_rows=st.none() | st.integers(1, 20),
    largest=st.booleans(),
)
def test_the_queue_finds_what_all_pairs_find(lengths, costs, share, most_rows, largest):
    lengths = np.sort(np.array(lengths))[::-1]
    alone, together = costs.peak_bytes(1, lengths[0]), costs.peak_bytes(len(lengths), lengths[0])
    terms = Terms(
        costs=costs, cap_bytes=int(np.ceil(alone + share * (together - alone))), most_rows=most_rows, largest=largest
    )
    weight = int(lengths.sum()) * len(lengths) + 1
    distinct, kinds = np.unique(lengths, return_inverse=True)
    widths = terms.widths(distinct, most=len(lengths))
    table = price_table(terms, distinct, widths, weight=weight)

    def price(bounds):
        return sum(table[kinds[begin], end - begin - 1] for begin, end in bounds)

    by_pairs = sizes(cheapest_by_all_pairs(table, kinds[None])[0])
    by_queue = sizes(cheapest_by_queue(widths[kinds].tolist(), line_prices(terms, lengths, weight=weight)))
    assert all(end - begin <= widths[kinds[begin]] for begin, end in by_queue)
    assert price(by_queue) == (price(by_pairs) if largest else pytest.approx(price(by_pairs), rel=1e-9))


@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=20), costs=costs())
def test_prices_without_arrays_are_those_of_the_table(lengths, costs):
    lengths = np.sort(np.array(lengths))[::-1]
    terms = Terms(costs=costs, cap_bytes=0)
    price = line_prices(terms, lengths, weight=1)
    for begin, length in enumerate(lengths):
        for rows in (1, 2, 7, 40, 300):
            assert price(begin, rows) == pytest.approx(float(costs.seconds(rows, length)), rel=1e-9, abs=1e-9)


def test_batches_do_not_touch_each_other_and_of_equal_cuts_the_last_micro_batch_is_the_largest():
    table = np.array([[1.0, 1.5, 9.0], [2.0, 5.0, 5.5]])
    kinds = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 0]])
    found = [sizes(begins) for begins in cheapest_by_all_pairs(table, kinds)]
    assert found == [[(0, 1), (1, 3)], [(0, 3)], [(0, 1), (1, 2), (2, 3)]]
    equal = np.array([[1.0, 2.0, 3.0]])
    assert sizes(cheapest_by_all_pairs(equal, np.zeros((1, 3), dtype=np.intp))[0]) == [(0, 3)]
    assert sizes(cheapest_by_queue([3, 3, 3], lambda _, rows: float(rows))) == [(0, 3)]
    assert sizes(cheapest_by_queue([2, 2, 2], lambda _, rows: float(rows))) == [(0, 1), (1, 3)]


def one_by_one(lengths, batch_size, cut_one):
    """(rows, padded length) of all micro-batches, how often each."""
    lengths = np.array(lengths)
    shapes = Counter()
    for start in range(0, len(lengths), batch_size):
        some = lengths[start : start + batch_size]
        shapes.update((len(rows), int(some[rows].max())) for rows in cut_one(some))
    return shapes


def check(found, shapes, lengths, batch_size, costs):
    assert found.num_steps == -(-len(lengths) // batch_size)
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
    largest=st.booleans(),
)
def test_they_are_those_of_cutting_batch_by_batch(lengths, batch_size, costs, share, largest):
    alone = float(costs.peak_bytes(1, np.array(lengths)).max())
    together = float(costs.peak_bytes(batch_size, max(lengths)))
    settings = {
        "costs": costs,
        "cap_bytes": int(np.ceil(alone + share * max(together - alone, 0))),
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
    found = cut_totals(lengths, batch_size, costs=costs, cap_bytes=0, fixed_rows=max_rows)
    check(found, shapes, lengths, batch_size, costs)


def test_blocks_of_any_size_come_to_the_same_and_large_batches_are_cut_one_by_one(monkeypatch):
    settings = {"costs": linear_costs(seconds=0.7), "cap_bytes": 1000 + 10 * 2000}
    lengths = np.random.default_rng(2).integers(1, 300, 2 * MOST_ROWS_FOR_ALL_PAIRS + 100)
    batch_size = MOST_ROWS_FOR_ALL_PAIRS + 50
    shapes = one_by_one(lengths, batch_size, lambda some: [part.rows for part in cut(some, **settings)])
    check(cut_totals(lengths, batch_size, **settings), shapes, lengths.tolist(), batch_size, settings["costs"])
    wholes = [cut_totals(lengths, 24, **settings, largest=largest) for largest in (False, True)]
    monkeypatch.setattr(totals, "_ENTRIES_AT_ONCE", 100)
    monkeypatch.setattr(totals, "_ENTRIES_OF_PRICES", 10)
    assert [cut_totals(lengths, 24, **settings, largest=largest) for largest in (False, True)] == wholes


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
    found = cut_totals(lengths, batch_size, costs=costs, cap_bytes=10_000, largest=True)
    assert found.num_steps == 31
    assert found.real_tokens == lengths.sum()
    first = cut_totals(kinds[0], batch_size, costs=costs, cap_bytes=10_000, largest=True)
    assert found.num_micro_batches == 30 * first.num_micro_batches + 1
    assert found.padded_tokens == 30 * batch_size * 10 + 200
    assert found.seconds == pytest.approx(30 * first.seconds + 200 * 0.01)


def test_a_row_over_the_cap_alone_and_fewer_rows_than_an_effective_batch():
    lengths = [10, 300, 20, 310, 310, 5]
    settings = {"costs": linear_costs(), "cap_bytes": 1000 + 10 * 100}
    with pytest.raises(RowTooLongError, match="row 3 of 310 tokens takes 4100 bytes alone, the cap is 2000") as raised:
        cut_totals(lengths, 2, **settings)
    error = raised.value
    assert (error.position, error.length, error.peak_bytes, error.cap_bytes) == (3, 310, 4100, 2000)
    shapes = one_by_one(lengths, 2, lambda some: [part.rows for part in cut(some, **settings)])
    check(cut_totals(lengths, 2, **settings, lone_rows_may_exceed=True), shapes, lengths, 2, settings["costs"])
    assert (1, 310) in shapes
    found = cut_totals([7, 7, 7], 32, costs=linear_costs(), cap_bytes=10_000)
    assert (found.num_steps, found.num_micro_batches, found.widest.rows, found.widest.count) == (1, 1, 3, 1)
