"""Cutting an effective batch into micro-batches, and the limit that falls where memory runs out and rises again."""

import json
import math
from dataclasses import asdict
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.batching.cost_examples import costs, cut, jagged_surfaces, linear_costs, rising_surfaces
from tests.properties import examples

from brim.batching import ByLength, ByRows, CapChange, by_costs
from brim.batching.microbatch import FIRST_WAIT_STEPS, Cap, cut_by_rows
from brim.batching.partition import MOST_ROWS_FOR_ALL_PAIRS, Terms, borders

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


@given(
    lengths=LENGTHS,
    costs=costs(peak=rising_surfaces() | jagged_surfaces()),
    share=st.floats(0, 1),
    most_rows=st.none() | st.integers(1, 9),
)
def test_a_cut_covers_every_row_once_and_respects_the_cap(lengths, costs, share, most_rows):
    cap_bytes = cap_for(costs, lengths, share)
    cuts = cut(lengths, costs=costs, cap_bytes=cap_bytes, most_rows=most_rows)
    order = [row for micro_batch in cuts for row in micro_batch.rows.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert order == sorted(order, key=lambda row: (-lengths[row], row))
    for micro_batch in cuts:
        assert micro_batch.padded_length == max(lengths[row] for row in micro_batch.rows)
        assert fits(costs, micro_batch.num_rows, micro_batch.padded_length, cap_bytes)
        exact = costs.peak_bytes(micro_batch.num_rows, micro_batch.padded_length)
        assert micro_batch.peak_bytes == int(np.ceil(exact)) <= cap_bytes
        assert micro_batch.seconds == costs.seconds(micro_batch.num_rows, micro_batch.padded_length)
        assert most_rows is None or micro_batch.num_rows <= most_rows


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    costs=costs(time=rising_surfaces()),
    share=st.floats(0, 1),
    limit=st.floats(0, 3000),
)
def test_no_partition_at_all_takes_less_time_and_the_largest_are_the_fewest_with_the_least_padding(
    lengths, costs, share, limit
):
    def size(shapes):
        return len(shapes), sum(rows * length for rows, length in shapes)

    settings = {"costs": costs, "cap_bytes": cap_for(costs, lengths, share)}
    allowed = allowed_shapes(lengths, **settings)
    quickest = shapes_of(cut(lengths, **settings))
    assert total_seconds(costs, quickest) == pytest.approx(
        min(total_seconds(costs, some) for some in allowed), rel=1e-12
    )
    assert size(shapes_of(cut(lengths, **settings, largest=True))) == min(map(size, allowed))
    # Under a limit on the seconds of a micro-batch, which a row alone may exceed.
    allowed = [some for some in allowed if all(rows == 1 or costs.seconds(rows, longest) <= limit
                                               for rows, longest in some)]  # fmt: skip
    in_order = np.sort(np.array(lengths))[::-1]
    _, bounds = borders(Terms(**settings), in_order, limits=[inf, limit])
    found = [(stop - start, in_order[start]) for start, stop in pairwise(bounds)]
    assert total_seconds(costs, found) == pytest.approx(min(total_seconds(costs, some) for some in allowed), rel=1e-12)
    _, bounds = borders(Terms(**settings, largest=True), in_order, limits=[inf, limit])
    found = [(stop - start, in_order[start]) for start, stop in pairwise(bounds)]
    assert size(found) == min(map(size, allowed))


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


def test_by_hand():
    # A launch costs as much as the padding that it saves. Together 3 · 100 tokens, 4 s; apart 2 + 1.2 s.
    cuts = cut([10, 100, 10], costs=linear_costs(), cap_bytes=10_000)
    assert shapes(cuts) == [([1], 100), ([0, 2], 10)]
    assert [part.peak_bytes for part in cuts] == [2000, 1200]
    assert [part.seconds for part in cuts] == pytest.approx([2.0, 1.2])
    assert shapes_of(cut([90, 100, 90], costs=linear_costs(), cap_bytes=10_000)) == [(3, 100)]
    assert shapes_of(cut([10, 100, 10], costs=linear_costs(), cap_bytes=10_000, largest=True)) == [(3, 100)]
    equal = cut([50] * 7, costs=linear_costs(), cap_bytes=1000 + 10 * 150)
    assert sorted(shapes_of(equal)) == [(1, 50), (3, 50), (3, 50)]
    assert cut([], costs=linear_costs(), cap_bytes=0) == []
    assert shapes_of(cut([5], costs=linear_costs(), cap_bytes=1050)) == [(1, 5)]


@pytest.mark.parametrize("more", [0, MOST_ROWS_FOR_ALL_PAIRS])
def test_rows_over_the_cap_alone_stay_alone(more):
    lengths = [300, 20, 310] + [20] * (3 + more)
    cuts = cut(lengths, costs=linear_costs(), cap_bytes=1000 + 10 * 100)
    assert [part.rows.tolist() for part in cuts[:2]] == [[2], [0]]
    assert all(part.padded_length == 20 and part.num_rows <= 5 for part in cuts[2:])
    all_over = cut(lengths, costs=linear_costs(), cap_bytes=10)
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


@pytest.mark.parametrize("num_rows", [40, MOST_ROWS_FOR_ALL_PAIRS + 100])
@pytest.mark.parametrize("largest", [False, True])
def test_cuts_to_be_dealt_have_ever_larger_micro_batches(num_rows, largest):
    lengths = np.random.default_rng(0).integers(1, 120, num_rows)
    cutter = by_costs(linear_costs(), cap_bytes=1000 + 10 * 5000, largest=largest)
    first, *others = cutter.cuts(lengths, ranks=4)
    assert shapes(first) == shapes(cutter.cut(lengths))
    for parts in others:
        assert sorted(np.concatenate([part.rows for part in parts]).tolist()) == list(range(num_rows))
        assert all(part.peak_bytes <= cutter.cap_bytes for part in parts)
        assert [part.seconds for part in parts] == [float(linear_costs().seconds(*shape)) for shape in shapes_of(parts)]
    longest = [max(part.seconds for part in parts) for parts in others]
    assert longest == sorted(longest)
    assert longest[-1] <= 1.2 * (total_seconds(linear_costs(), shapes_of(first)) + 4) / 4
    numbers = [len(parts) for parts in [*others, first]]
    assert numbers == sorted(numbers, reverse=True)
    assert len(others) > 3


# The limit by which they are cut


def clean(cap, steps):
    for _ in range(steps):
        cap = cap.after_clean_step()
    return cap


def halved(cap):
    return cap.lowered(cap.now // 2, failed=cap.now)


def test_a_limit_falls_and_rises_up_to_that_of_the_launch():
    assert clean(Cap(now=64), 1000) == Cap(now=64)
    low = halved(halved(Cap(now=64)))
    assert low == Cap(now=16, before=(64, 32))
    assert clean(low, FIRST_WAIT_STEPS - 1).now == 16
    raised = clean(low, FIRST_WAIT_STEPS)
    assert raised == Cap(now=32, before=(64,), raised_from=16)
    at_launch = clean(raised, FIRST_WAIT_STEPS)
    assert clean(at_launch, 1000) == at_launch == Cap(now=64, raised_from=32)
    assert clean(halved(clean(halved(Cap(now=64)), 49)), 49).now == 16  # running out begins the wait again
    # What fails at a raised limit goes back to what went well, and waits twice as long.
    raised = clean(halved(Cap(now=64)), 50)
    failed = raised.lowered(25, failed=36)
    assert failed == Cap(now=32, before=(64,), wait_steps=100)
    assert [clean(failed, steps).now for steps in (99, 100)] == [32, 64]
    # Lower still where memory ran out at what had gone well.
    assert raised.lowered(20, failed=30) == Cap(now=20, before=(64,), wait_steps=100)


def outs_of_memory(limit, launch, num_steps, shape):
    """Each step runs one micro-batch of `shape(step, cap)`, and what is above the limit runs out of memory."""
    cap, failures = Cap(now=launch), 0
    for step in range(num_steps):
        while (size := shape(step, cap.now)) > limit:
            failures += 1
            cap = cap.lowered(int(0.7 * min(cap.now, size)), failed=size)
        cap = cap.after_clean_step()
        assert cap.now <= launch
    return failures


@given(
    limit=st.integers(50_000, 99_999),
    num_steps=st.sampled_from([500, 2000, 5000]),
    shares=st.lists(st.floats(0.5, 1.0), min_size=1, max_size=20),
)
def test_a_model_wrong_by_half_runs_out_at_most_five_times_in_500_steps(limit, num_steps, shares):
    # The shapes of a step reach a share of the cap that changes from step to step.
    failures = outs_of_memory(limit, 100_000, num_steps, lambda step, cap: int(cap * shares[step % len(shares)]))
    assert failures <= 5 + math.log2(num_steps / 500)


@given(fails=st.lists(st.booleans(), max_size=400), wait_steps=st.integers(1, 4))
def test_whatever_happens_the_limit_stays_between_one_and_the_launch(fails, wait_steps):
    cap = Cap(now=1000, wait_steps=wait_steps)
    for failed in fails:
        before = cap
        if failed and cap.now > 1:
            cap = cap.lowered(int(0.7 * cap.now), failed=cap.now)
            assert cap.now < before.now
        else:
            cap = cap.after_clean_step()
            assert cap.now >= before.now
        assert 0 <= cap.now <= 1000
        assert (cap.before[0] if cap.before else cap.now) == 1000
        assert Cap.from_dict(json.loads(json.dumps(asdict(cap)))) == cap


# By length


CAP_BYTES = 1000 + 10 * 300


def cutter(**settings):
    return ByLength(costs=linear_costs(seconds=50.0), cap_bytes=CAP_BYTES, **settings)


def shapes(cuts):
    return [(part.rows.tolist(), part.padded_length) for part in cuts]


def test_the_cap_falls_by_what_the_shape_adds():
    by_length = cutter()
    (alone,) = by_length.cut([500])
    assert by_length.lower(alone) is None  # a lone row changes nothing
    assert by_length.cap_bytes == CAP_BYTES
    failed = by_length.cut([100, 100])[0]
    assert failed.peak_bytes == 3000
    assert by_length.lower(failed) == CapChange(before=4000, after=1000 + 1400, unit="bytes")
    assert [part.num_rows for part in by_length.cut([100, 100])] == [1, 1]
    changes = [by_length.clean_step() for _ in range(60)]
    assert changes == [None] * 49 + [CapChange(before=2400, after=4000, unit="bytes")] + [None] * 10
    free = ByLength(costs=linear_costs(bytes_per_token=0), cap_bytes=5000)  # where rows add nothing
    failed = free.cut([10, 10])[0]
    assert free.lower(failed).after == failed.peak_bytes - 1
    assert [part.num_rows for part in free.cut([10, 10])] == [1, 1]


@given(
    lengths=st.lists(st.integers(1, 200), min_size=2, max_size=40),
    bytes_per_token=st.floats(0, 50),
    static_bytes=st.integers(0, 5000),
)
def test_the_same_rows_are_cut_smaller_until_each_is_alone(lengths, bytes_per_token, static_bytes):
    costs = linear_costs(bytes_per_token=bytes_per_token, static_bytes=static_bytes, seconds=1000.0)
    by_length = ByLength(costs=costs, cap_bytes=10_000)
    for _ in range(60):
        cuts = by_length.cut(lengths)
        assert sorted(np.concatenate([part.rows for part in cuts]).tolist()) == list(range(len(lengths)))
        together = [part for part in cuts if part.num_rows > 1]
        if not together:
            break
        failed = min(together, key=lambda part: part.peak_bytes)  # the least that it can learn from
        change = by_length.lower(failed)
        assert change.after < min(failed.peak_bytes, change.before)
    else:
        pytest.fail("it does not come to an end")


@pytest.mark.parametrize(
    ("make", "other"),
    [(cutter, ByLength(costs=linear_costs(), cap_bytes=1)), (lambda: ByRows(max_rows=32), ByRows(max_rows=4))],
    ids=["by length", "by rows"],
)
@examples(20)
@given(
    outcomes=st.lists(st.integers(0, 200), max_size=6), lengths=st.lists(st.integers(1, 200), min_size=1, max_size=40)
)
def test_a_restored_cutter_goes_on_the_same(make, other, outcomes, lengths):
    one = make()
    for clean_steps in outcomes:
        for _ in range(clean_steps):
            one.clean_step()
        one.lower(one.cut(lengths)[0])
    other.restore(json.loads(json.dumps(one.state())))
    for _ in range(3):
        assert shapes(one.cut(lengths)) == shapes(other.cut(lengths))
        assert [one.clean_step() for _ in range(60)] == [other.clean_step() for _ in range(60)]
    assert one.state() == other.state()


# By rows


@given(lengths=st.lists(st.integers(1, 100), max_size=60), max_rows=st.integers(1, 70))
def test_by_rows_every_row_once_longest_first_and_none_too_wide(lengths, max_rows):
    cuts = ByRows(max_rows=max_rows).cut(lengths)
    order = [row for part in cuts for row in part.rows.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    assert all(part.num_rows == max_rows for part in cuts[:-1])
    assert all(1 <= part.num_rows <= max_rows for part in cuts[-1:])
    assert [part.padded_length for part in cuts] == [max(lengths[row] for row in part.rows) for part in cuts]
    assert all(part.peak_bytes is None and part.seconds is None for part in cuts)
    by_function = cut_by_rows(np.array(lengths, dtype=int), max_rows=max_rows)
    assert [part.rows.tolist() for part in cuts] == [rows.tolist() for rows in by_function]


def test_rows_halve_and_come_back():
    by_rows = ByRows(max_rows=5)
    assert by_rows.lower(by_rows.cut([3] * 9)[0]) == CapChange(before=5, after=2, unit="rows")
    assert [part.num_rows for part in by_rows.cut([3] * 9)] == [2, 2, 2, 2, 1]
    assert by_rows.lower(by_rows.cut([3] * 9)[-1]) is None
    assert by_rows.lower(by_rows.cut([3] * 9)[0]) == CapChange(before=2, after=1, unit="rows")
    assert by_rows.max_rows == 1
    changes = [by_rows.clean_step() for _ in range(150)]
    assert [(number, change.after) for number, change in enumerate(changes) if change] == [(49, 2), (99, 5)]
    by_rows = ByRows(max_rows=8)  # the last smaller one may be what fails
    assert by_rows.lower(by_rows.cut([9] * 11)[1]) == CapChange(before=8, after=1, unit="rows")


# Random groups of rows: neighbours in the batch's own order, under the same caps


@given(
    lengths=st.lists(st.integers(1, 120), max_size=40),
    max_rows=st.integers(1, 20),
    num_groups=st.integers(1, 12),
)
def test_by_rows_every_row_once_in_order_and_no_group_over_the_limit(lengths, max_rows, num_groups):
    cuts = ByRows(max_rows=max_rows).cut_in_order(lengths, num_groups=num_groups)
    assert [row for part in cuts for row in part.rows] == list(range(len(lengths)))
    assert all(1 <= part.num_rows <= max_rows for part in cuts)
    assert [part.padded_length for part in cuts] == [max(lengths[row] for row in part.rows) for part in cuts]
    if len(lengths) <= num_groups * max_rows:
        assert len(cuts) == min(num_groups, len(lengths))


@examples(50)
@given(
    costs=costs(peak=st.one_of(rising_surfaces(), jagged_surfaces())),
    cap_bytes=st.integers(0, 4000),
    most_rows=st.one_of(st.none(), st.integers(1, 8)),
    lengths=st.lists(st.integers(1, 120), max_size=40),
    num_groups=st.integers(1, 12),
)
def test_by_length_no_group_is_over_the_cap_and_each_is_as_large_as_wished_or_as_fits(
    costs, cap_bytes, most_rows, lengths, num_groups
):
    cuts = ByLength(costs=costs, cap_bytes=cap_bytes, most_rows=most_rows).cut_in_order(lengths, num_groups=num_groups)
    assert [row for part in cuts for row in part.rows] == list(range(len(lengths)))
    for number, part in enumerate(cuts):
        first, after = part.rows[0], part.rows[-1] + 1
        assert part.padded_length == max(lengths[first:after])
        assert part.peak_bytes == np.ceil(costs.peak_bytes(part.num_rows, part.padded_length))
        assert part.seconds == costs.seconds(part.num_rows, part.padded_length)
        assert part.num_rows == 1 or (part.peak_bytes <= cap_bytes and part.num_rows <= (most_rows or 40))
        wished = int(np.ceil((len(lengths) - first) / max(1, num_groups - number)))
        assert part.num_rows <= wished
        if part.num_rows < min(wished, most_rows or 40):
            with_one_more = costs.peak_bytes(part.num_rows + 1, max(lengths[first : after + 1]))
            assert max(with_one_more, part.peak_bytes) > cap_bytes  # a row may be over the cap alone
