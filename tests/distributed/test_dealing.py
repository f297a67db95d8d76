"""Dealing an effective batch to ranks: every row once, the same for all who ask, and close to the least time."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import costs, linear_costs, rising_surfaces
from tests.properties import examples

from brim.batching import MULTIPLE, ByLength, ByRows, MicroBatch, by_costs, cutter_of
from brim.distributed.dealing import busy_share, claimable, claimed_s, deal, lockstep

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=30)
RANKS = st.integers(1, 6)


@st.composite
def cutters(draw):
    """A cutter of each kind, with a cap between a row or so and all of them."""
    if draw(st.booleans()):
        some = draw(costs(time=rising_surfaces()))
        some = replace(some, multiple=draw(st.sampled_from([1, MULTIPLE])))
        return by_costs(some, cap_bytes=draw(st.integers(0, 6000)), largest=draw(st.booleans()))
    return ByRows(max_rows=draw(st.integers(1, 20)))


def work(part):
    return part.num_rows * part.padded_length if part.seconds is None else part.seconds


def loads(dealt):
    return [sum(map(work, parts)) for parts in dealt]


def shown(dealt):
    return [
        [(part.rows.tolist(), part.padded_length, part.peak_bytes, part.seconds) for part in each] for each in dealt
    ]


def linear(*, cap_rows=1000, **settings):
    """A second for a micro-batch and one for 100 tokens of it."""
    return ByLength(costs=linear_costs(**settings), cap_bytes=1000 + 10 * 100 * cap_rows)


@given(
    cutter=cutters(), lengths=LENGTHS, ranks=RANKS, num_groups=st.none() | st.integers(1, 8), in_lockstep=st.booleans()
)
def test_every_row_is_dealt_once_under_the_cap_and_equally_to_all_who_ask(
    cutter, lengths, ranks, num_groups, in_lockstep
):
    how = {"ranks": ranks, "num_groups": num_groups, "in_lockstep": in_lockstep}
    dealt = deal(cutter, lengths, **how)
    assert len(dealt) == ranks
    parts = [part for parts in dealt for part in parts]
    assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(len(lengths)))
    assert [part.padded_length for part in parts] == [max(lengths[row] for row in part.rows) for part in parts]
    if isinstance(cutter, ByRows):
        assert all(part.num_rows <= cutter.max_rows for part in parts)
    else:
        assert all(part.num_rows == 1 or part.peak_bytes <= cutter.cap_bytes for part in parts)
    assert 0 < busy_share(dealt, in_lockstep=in_lockstep) <= 1 + 1e-12
    assert shown(deal(cutter_of(cutter.state()), np.array(lengths), **how)) == shown(dealt)


@given(cutter=cutters(), lengths=LENGTHS, num_groups=st.integers(1, 8))
def test_one_rank_gets_what_the_cutter_cuts(cutter, lengths, num_groups):
    for in_lockstep in (False, True):
        assert shown(deal(cutter, lengths, ranks=1, in_lockstep=in_lockstep)) == shown([cutter.cut(lengths)])
    in_order = shown([cutter.cut_in_order(lengths, num_groups=num_groups)])
    assert shown(deal(cutter, lengths, ranks=1, num_groups=num_groups)) == in_order


@given(cutter=cutters(), lengths=LENGTHS, ranks=RANKS, data=st.data())
def test_the_loads_do_not_follow_the_order_of_the_rows(cutter, lengths, ranks, data):
    moved = data.draw(st.permutations(lengths))
    assert loads(deal(cutter, moved, ranks=ranks)) == pytest.approx(loads(deal(cutter, lengths, ranks=ranks)))


@given(
    cutter=cutters(),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=9),
    ranks=st.integers(2, 3),
    num_groups=st.none() | st.integers(1, 7),
)
def test_the_longest_rank_is_within_grahams_bound_of_the_best_way_to_deal_the_same_cut(
    cutter, lengths, ranks, num_groups
):
    dealt = deal(cutter, lengths, ranks=ranks, num_groups=num_groups)
    parts = [work(part) for parts in dealt for part in parts]
    if len(parts) > 7:
        parts = sorted(parts)[-7:]  # the longest alone cannot be dealt better than all
    best = min(
        max(sum(each for each, to in zip(parts, way, strict=True) if to == rank) for rank in range(ranks))
        for way in product(range(ranks), repeat=len(parts))
    )
    best = max(best, sum(loads(dealt)) / ranks)
    assert max(loads(dealt)) <= best * (4 / 3 - 1 / (3 * ranks)) * (1 + 1e-12)


@examples(50)
@given(some=costs(time=rising_surfaces()), lengths=LENGTHS, ranks=st.integers(2, 6), cap_bytes=st.integers(0, 6000))
def test_the_longest_rank_takes_no_longer_than_with_the_cut_of_one_and_no_less_than_its_share(
    some, lengths, ranks, cap_bytes
):
    cutter = ByLength(costs=some, cap_bytes=cap_bytes)
    quickest = sorted(map(work, cutter.cut(lengths)), reverse=True)
    dealt = [0.0] * ranks
    for each in quickest:
        dealt[dealt.index(min(dealt))] += each
    longest = max(loads(deal(cutter, lengths, ranks=ranks)))
    least = max(sum(quickest) / ranks, float(some.seconds(1, max(lengths))))
    assert least * (1 - 1e-12) <= longest <= max(dealt) * (1 + 1e-12)
    in_rounds = deal(cutter, lengths, ranks=ranks, in_lockstep=True)
    assert least * (1 - 1e-12) <= seconds_of(lockstep(in_rounds, ranks)) <= sum(quickest[::ranks]) * (1 + 1e-12)


def seconds_of(rounds):
    return sum(max(work(part) for part in parts if part is not None) for parts in rounds)


@given(cutter=cutters(), lengths=LENGTHS, ranks=RANKS, in_lockstep=st.booleans())
def test_in_lockstep_each_rank_runs_its_own_or_a_dummy_in_every_round(cutter, lengths, ranks, in_lockstep):
    dealt = deal(cutter, lengths, ranks=ranks, in_lockstep=in_lockstep)
    rounds = lockstep(dealt, ranks)
    assert all(len(parts) == ranks for parts in rounds)
    assert all(part is not None for parts in rounds[:-1] for part in parts)
    of_each = [[parts[rank] for parts in rounds if parts[rank] is not None] for rank in range(ranks)]
    if in_lockstep or ranks == 1:
        assert shown(of_each) == shown(dealt)
    in_turn = [work(part) for parts in rounds for part in parts if part is not None]
    if ranks > 1:
        assert in_turn == sorted((work(part) for parts in dealt for part in parts), reverse=True)
    busy = sum(in_turn) / (ranks * seconds_of(rounds)) if any(in_turn) else 1.0
    assert busy_share(dealt, in_lockstep=True) == pytest.approx(busy)


def rows(dealt):
    return [[part.rows.tolist() for part in parts] for parts in dealt]


def test_by_hand():
    # One micro-batch of four rows takes 5 s, two of two 3 s each, four of one 2 s each.
    assert rows(deal(linear(), [100] * 4, ranks=1)) == [[[0, 1, 2, 3]]]
    assert rows(deal(linear(), [100] * 4, ranks=2)) == [[[0, 1]], [[2, 3]]]
    assert rows(deal(linear(), [100] * 4, ranks=4)) == [[[0]], [[1]], [[2]], [[3]]]
    # A long row takes as long as whatever is made of the others, so that they are not torn apart.
    long = deal(linear(), [10, 400, 10, 10], ranks=3)
    assert rows(long) == [[[1]], [[0, 2, 3]], []]
    assert busy_share(long) == pytest.approx((5 + 1.3) / 3 / 5)
    assert rows(deal(linear(), [7], ranks=3)) == [[[0]], [], []]
    for in_lockstep in (False, True):
        assert rows(deal(linear(), [], ranks=2, in_lockstep=in_lockstep)) == [[], []]
        assert busy_share([[], []], in_lockstep=in_lockstep) == 1.0
    assert lockstep([[], []], 2) == []
    # Micro-batches of 2 s each, of as many rows as the cap allows, and of two short rows.
    alone = linear(cap_rows=1)
    assert rows(deal(alone, [100, 100, 100, 50, 50], ranks=2)) == [[[0], [2]], [[1], [3, 4]]]
    # Random groups are what they are with one rank. The one of 4 s has the first rank to itself.
    assert rows(deal(linear(), [50, 300, 10, 10, 20, 20], ranks=2, num_groups=3)) == [[[0, 1]], [[2, 3], [4, 5]]]


def test_packed_rows_and_fixed_ones_fill_the_last_round_by_hand():
    packed = by_costs(replace(linear_costs(), multiple=MULTIPLE), cap_bytes=1000 + 10 * 256)
    lengths = [64, 128, 64, 128, 10, 20, 30]  # two of 256 tokens would do
    assert [len(parts) for parts in deal(packed, lengths, ranks=2)] == [1, 1]
    dealt = deal(packed, lengths, ranks=3)
    assert rows(dealt) == [[[1, 6]], [[3, 5]], [[0, 2, 4]]]
    assert loads(dealt) == pytest.approx([1 + 0.01 * 192] * 3)
    # Four of 8 rows would be two rounds of three ranks, as six of 6 or 5 are.
    fixed = deal(ByRows(max_rows=8), [10] * 32, ranks=3)
    assert [[part.num_rows for part in parts] for parts in fixed] == [[6, 5], [5, 6], [5, 5]]
    assert [len(parts) for parts in deal(ByRows(max_rows=8), [10] * 3, ranks=4)] == [1, 1, 1, 0]


@given(cutter=cutters(), lengths=LENGTHS, ranks=st.integers(2, 6))
def test_what_is_claimed_is_every_row_once_and_done_sooner_where_a_rank_is_slow(cutter, lengths, ranks):
    parts = claimable(cutter, lengths, ranks=ranks)
    assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(len(lengths)))
    assert list(map(work, parts)) == sorted(map(work, parts), reverse=True)
    for cut in cutter.cuts(lengths, ranks=ranks):
        assert claimed_s(parts, ranks) <= claimed_s(sorted(cut, key=lambda part: (-work(part), part.rows[0])), ranks)


def test_a_slow_rank_claims_less():
    assert claimed_s([MicroBatch(rows=np.arange(1), padded_length=8)] * 5, 2) == 3 * 8.0
    assert claimed_s([MicroBatch(rows=np.arange(1), padded_length=8)] * 5, 2, slower=4.0) == 4 * 8.0
