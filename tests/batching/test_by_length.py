"""The cutter by length."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import linear_costs
from tests.properties import examples

from brim.batching import ByLength, CapChange
from brim.batching.microbatch import cut

LENGTHS = [40, 100, 7, 7, 80, 33, 33, 60]
CAP_BYTES = 1000 + 10 * 300


def shapes(micro_batches):
    return [(micro_batch.rows.tolist(), micro_batch.padded_length) for micro_batch in micro_batches]


def cutter(**settings):
    return ByLength(costs=linear_costs(seconds=50.0), cap_bytes=CAP_BYTES, **settings)


@pytest.mark.parametrize("settings", [{}, {"most_rows": 2}, {"largest": True}])
def test_it_cuts_as_cut_does(settings):
    expected = cut(LENGTHS, costs=linear_costs(seconds=50.0), cap_bytes=CAP_BYTES, **settings)
    assert shapes(cutter(**settings).cut(LENGTHS)) == shapes(expected)


def test_the_cap_falls_by_what_the_shape_adds_and_rises_again():
    by_length = cutter()
    failed = by_length.cut([100, 100])[0]
    assert failed.peak_bytes == 3000
    assert by_length.lower(failed) == CapChange(before=4000, after=1000 + 1400, unit="bytes")
    assert [micro_batch.num_rows for micro_batch in by_length.cut([100, 100])] == [1, 1]
    changes = [by_length.clean_step() for _ in range(60)]
    assert changes[:49] == [None] * 49
    assert changes[49] == CapChange(before=2400, after=4000, unit="bytes")
    assert changes[50:] == [None] * 10


def test_a_lone_row_changes_nothing():
    by_length = cutter()
    (alone,) = by_length.cut([500])
    assert by_length.lower(alone) is None
    assert by_length.cap_bytes == CAP_BYTES


def test_where_rows_add_nothing_the_cap_still_excludes_what_failed():
    by_length = ByLength(costs=linear_costs(bytes_per_token=0), cap_bytes=5000)
    failed = by_length.cut([10, 10])[0]
    assert by_length.lower(failed).after == failed.peak_bytes - 1
    assert [micro_batch.num_rows for micro_batch in by_length.cut([10, 10])] == [1, 1]


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


@examples(20)
@given(
    outcomes=st.lists(st.integers(0, 200), max_size=6), lengths=st.lists(st.integers(1, 200), min_size=1, max_size=40)
)
def test_a_restored_cutter_goes_on_the_same(outcomes, lengths):
    one, other = cutter(), ByLength(costs=linear_costs(), cap_bytes=1)
    for clean_steps in outcomes:
        for _ in range(clean_steps):
            one.clean_step()
        one.lower(one.cut(lengths)[0])
    other.restore(json.loads(json.dumps(one.state())))
    for _ in range(3):
        assert shapes(one.cut(lengths)) == shapes(other.cut(lengths))
        assert [one.clean_step() for _ in range(60)] == [other.clean_step() for _ in range(60)]
    assert one.state() == other.state()


def run(by_length, bytes_per_token, limit_bytes, num_steps):
    """Steps on random rows under a real limit; how often memory ran out, and all rows that were learned from."""
    random = np.random.default_rng(0)
    failures = 0
    for _ in range(num_steps):
        lengths = np.minimum(random.lognormal(4.9, 0.8, 32).astype(int) + 1, 2000)
        done = False
        while not done:
            done = True
            for part in by_length.cut(lengths):
                if part.num_rows > 1 and 1000 + bytes_per_token * part.num_rows * part.padded_length > limit_bytes:
                    by_length.lower(part)
                    failures += 1
                    done = False
                    break
        by_length.clean_step()
    return failures


@pytest.mark.parametrize("largest", [False, True])
def test_a_memory_model_that_promises_twice_the_room(largest):
    costs = linear_costs(bytes_per_token=10, seconds=0.5, seconds_per_token=0.001)
    limit_bytes = 1000 + 20 * 2000
    right = linear_costs(bytes_per_token=20, seconds=0.5, seconds_per_token=0.001)
    assert 0 < run(ByLength(costs=costs, cap_bytes=limit_bytes, largest=largest), 20, limit_bytes, 500) <= 5
    assert run(ByLength(costs=right, cap_bytes=limit_bytes, largest=largest), 20, limit_bytes, 50) == 0
