"""Cutting an effective batch."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import costs, jagged_surfaces, linear_costs, rising_surfaces
from tests.properties import examples

from brim.batching.microbatch import cut, cut_by_rows, widest
from brim.batching.partition import MOST_ROWS_FOR_ALL_PAIRS, RowTooLongError

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=40)


def all_partitions(rows):
    """Of a list into lists, the order of neither counting."""
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for part in all_partitions(rest):
        for number in range(len(part)):
            yield [*part[:number], [first, *part[number]], *part[number + 1 :]]
        yield [[first], *part]


def allowed_shapes(lengths, costs, cap_bytes):
    """(rows, longest) of the micro-batches of every partition that keeps to the cap."""
    shapes = {tuple(sorted((len(part), max(part)) for part in parts)) for parts in all_partitions(lengths)}
    allowed = {shape: fits(costs, *shape, cap_bytes) for some in shapes for shape in some}
    return [some for some in shapes if all(allowed[shape] for shape in some)]


def total_seconds(costs, shapes):
    rows, padded = np.array(shapes).T
    return float(costs.seconds(rows, padded).sum())


def shapes_of(micro_batches):
    return [(micro_batch.num_rows, micro_batch.padded_length) for micro_batch in micro_batches]


def cap_for(costs, lengths, share):
    """Some bytes between what the worst row takes alone and what all of them take together."""
    alone = float(costs.peak_bytes(1, np.array(lengths)).max())
    together = float(costs.peak_bytes(len(lengths), max(lengths)))
    return int(np.ceil(alone + share * max(together - alone, 0)))


def fits(costs, rows, length, cap_bytes):
    """As many rows, and any fewer."""
    return bool((costs.peak_bytes(np.arange(1, rows + 1), length) <= cap_bytes).all())


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), max_rows=st.integers(1, 70))
def test_every_row_once_longest_first_and_no_cut_too_wide(lengths, max_rows):
    cuts = [cut.tolist() for cut in cut_by_rows(np.array(lengths), max_rows=max_rows)]
    order = [row for cut in cuts for row in cut]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    assert all(len(cut) == max_rows for cut in cuts[:-1])
    assert 1 <= len(cuts[-1]) <= max_rows


@given(lengths=LENGTHS, costs=costs(), share=st.floats(0, 1), most_rows=st.none() | st.integers(1, 9))
def test_a_cut_covers_every_row_once_and_respects_the_cap(lengths, costs, share, most_rows):
    cap_bytes = cap_for(costs, lengths, share)
    cuts = cut(lengths, costs=costs, cap_bytes=cap_bytes, most_rows=most_rows)
    order = [row for micro_batch in cuts for row in micro_batch.rows.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert order == sorted(order, key=lambda row: (-lengths[row], row))
    for micro_batch in cuts:
        assert micro_batch.padded_length == max(lengths[row] for row in micro_batch.rows)
        exact = costs.peak_bytes(micro_batch.num_rows, micro_batch.padded_length)
        assert exact <= micro_batch.peak_bytes <= cap_bytes
        assert micro_batch.peak_bytes == int(np.ceil(exact))
        assert micro_batch.seconds == costs.seconds(micro_batch.num_rows, micro_batch.padded_length)
        assert most_rows is None or micro_batch.num_rows <= most_rows


@given(lengths=st.lists(st.integers(1, 120), min_size=1, max_size=30), costs=costs(peak=jagged_surfaces()))
def test_no_micro_batch_is_over_the_cap_where_the_peak_rises_and_falls(lengths, costs):
    cap_bytes = cap_for(costs, lengths, 0.0) + 150
    for micro_batch in cut(lengths, costs=costs, cap_bytes=cap_bytes):
        assert fits(costs, micro_batch.num_rows, micro_batch.padded_length, cap_bytes)


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    costs=costs(time=rising_surfaces()),
    share=st.floats(0, 1),
)
def test_no_partition_at_all_takes_less_time(lengths, costs, share):
    cap_bytes = cap_for(costs, lengths, share)
    least = min(total_seconds(costs, some) for some in allowed_shapes(lengths, costs, cap_bytes))
    found = total_seconds(costs, shapes_of(cut(lengths, costs=costs, cap_bytes=cap_bytes)))
    assert found == pytest.approx(least, rel=1e-12)


@given(lengths=st.lists(st.integers(1, 120), min_size=1, max_size=6), costs=costs(), share=st.floats(0, 1))
def test_the_largest_are_the_fewest_with_the_least_padding(lengths, costs, share):
    cap_bytes = cap_for(costs, lengths, share)
    least = min(
        (len(some), sum(rows * length for rows, length in some)) for some in allowed_shapes(lengths, costs, cap_bytes)
    )
    found = shapes_of(cut(lengths, costs=costs, cap_bytes=cap_bytes, largest=True))
    assert (len(found), sum(rows * length for rows, length in found)) == least


@given(lengths=LENGTHS, costs=costs(), share=st.floats(0, 1))
def test_never_slower_than_filling_each_micro_batch(lengths, costs, share):
    cap_bytes = cap_for(costs, lengths, share)
    greedy = [[]]
    for length in sorted(lengths, reverse=True):
        if greedy[-1] and not fits(costs, len(greedy[-1]) + 1, greedy[-1][0], cap_bytes):
            greedy.append([])
        greedy[-1].append(length)
    found = total_seconds(costs, shapes_of(cut(lengths, costs=costs, cap_bytes=cap_bytes)))
    assert found <= total_seconds(costs, [(len(part), part[0]) for part in greedy]) * (1 + 1e-12)


def test_a_launch_costs_as_much_as_the_padding_that_it_saves():
    # Together 3 · 100 tokens, 4 s. Apart 1 + 1 and 1 + 2 · 10 tokens, 3.2 s.
    cuts = cut([10, 100, 10], costs=linear_costs(), cap_bytes=10_000)
    assert shapes_of(cuts) == [(1, 100), (2, 10)]
    assert [micro_batch.rows.tolist() for micro_batch in cuts] == [[1], [0, 2]]
    assert [micro_batch.peak_bytes for micro_batch in cuts] == [2000, 1200]
    assert [micro_batch.seconds for micro_batch in cuts] == pytest.approx([2.0, 1.2])
    assert shapes_of(cut([90, 100, 90], costs=linear_costs(), cap_bytes=10_000)) == [(3, 100)]
    assert shapes_of(cut([10, 100, 10], costs=linear_costs(), cap_bytes=10_000, largest=True)) == [(3, 100)]
    assert widest(cuts) is cuts[0]


def test_equal_lengths_fill_the_cap():
    cuts = cut([50] * 7, costs=linear_costs(), cap_bytes=1000 + 10 * 150)
    assert sorted(shapes_of(cuts)) == [(1, 50), (3, 50), (3, 50)]


def test_nothing_to_cut_and_one_row():
    assert cut([], costs=linear_costs(), cap_bytes=0) == []
    assert shapes_of(cut([5], costs=linear_costs(), cap_bytes=1050)) == [(1, 5)]


@pytest.mark.parametrize("num_rows", [4, MOST_ROWS_FOR_ALL_PAIRS + 4])
def test_a_row_over_the_cap_alone_is_named(num_rows):
    with pytest.raises(RowTooLongError, match="row 2 of 300 tokens takes 4000 bytes alone, the cap is 3999") as raised:
        cut([10, 20, 300, *[299] * (num_rows - 3)], costs=linear_costs(), cap_bytes=3999)
    error = raised.value
    assert (error.position, error.length, error.peak_bytes, error.cap_bytes) == (2, 300, 4000, 3999)


@pytest.mark.parametrize("num_rows", [6, MOST_ROWS_FOR_ALL_PAIRS + 6])
def test_rows_over_the_cap_alone_stay_alone_where_they_may(num_rows):
    lengths = [300, 20, 310] + [20] * (num_rows - 3)
    cuts = cut(lengths, costs=linear_costs(), cap_bytes=1000 + 10 * 100, lone_rows_may_exceed=True)
    assert [micro_batch.rows.tolist() for micro_batch in cuts[:2]] == [[2], [0]]
    assert all(micro_batch.padded_length == 20 and micro_batch.num_rows <= 5 for micro_batch in cuts[2:])
    all_over = cut(lengths, costs=linear_costs(), cap_bytes=10, lone_rows_may_exceed=True)
    assert shapes_of(all_over) == [(1, length) for length in sorted(lengths, reverse=True)]


@examples(20)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(MOST_ROWS_FOR_ALL_PAIRS + 1, MOST_ROWS_FOR_ALL_PAIRS + 200),
    costs=costs(peak=jagged_surfaces(), time=jagged_surfaces()),
    largest=st.booleans(),
)
def test_a_large_batch_is_covered_under_the_cap_too(seed, num_rows, costs, largest):
    lengths = np.random.default_rng(seed).integers(1, 120, num_rows)
    cap_bytes = cap_for(costs, lengths, 0.05)  # neither surface is what the near-linear way is exact for
    cuts = cut(lengths, costs=costs, cap_bytes=cap_bytes, largest=largest)
    assert sorted(np.concatenate([micro_batch.rows for micro_batch in cuts]).tolist()) == list(range(num_rows))
    assert all(micro_batch.peak_bytes <= cap_bytes for micro_batch in cuts)
    assert all(micro_batch.padded_length == lengths[micro_batch.rows].max() for micro_batch in cuts)
