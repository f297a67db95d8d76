"""Which shapes are timed: under the cap, of lengths that there are, for a small share of the run."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.batching import Costs, Surface
from brim.planning.costs import shapes_to_time
from brim.planning.costs.timing import CALLS

LENGTHS = [48, 60, 118, 118, 130, 200, 452, 512] * 20


def linear(per_token):
    return Surface(base=0.0, lengths=(1,), tokens=((1000,),), values=((1000.0 * per_token,),))


def timing(lengths=LENGTHS, *, cap_bytes=10**6, most_rows=32, run_s=1e6, most_s=30.0, token_s=1e-4):
    costs = Costs(peak=linear(1.0), static_bytes=0, time=linear(token_s))
    return shapes_to_time(lengths, costs=costs, cap_bytes=cap_bytes, most_rows=most_rows, run_s=run_s, most_s=most_s)


def test_the_first_ones_tell_most():
    shapes = timing().shapes
    assert shapes[:4] == ((1, 48), (10, 48), (1, 512), (20, 48))
    assert shapes[-1] == (32, 512)
    tokens = [rows * length for rows, length in shapes[4:]]
    assert tokens == sorted(tokens)


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=50), st.integers(1, 100_000), st.integers(1, 64)
)  # fmt: skip
def test_no_shape_is_over_the_cap_or_made_up(lengths, cap_bytes, most_rows):
    found = timing(lengths, cap_bytes=cap_bytes, most_rows=most_rows)
    for rows, length in found.shapes:
        assert rows * length <= cap_bytes
        assert rows <= most_rows
        assert length in lengths
    assert len(set(found.shapes)) == len(found.shapes)


@given(st.lists(st.integers(16, 2000), min_size=20, max_size=50))
def test_the_first_four_tell_a_floor_and_two_slopes_apart(lengths):
    shapes = np.array(timing(lengths).shapes[:4], dtype=float)
    tokens, lengths_of = shapes[:, 0] * shapes[:, 1], shapes[:, 1]
    features = np.stack([np.ones(4), tokens / tokens.max(), tokens * lengths_of / (tokens * lengths_of).max()])
    if lengths_of.max() >= 2 * lengths_of.min():
        assert np.linalg.matrix_rank(features, tol=1e-6) == 3


def test_a_short_run_is_not_measured():
    needed_s = CALLS * 1e-4 * (48 + 10 * 48 + 512 + 20 * 48)
    assert timing(run_s=1.01 * needed_s / 0.02).shapes
    found = timing(run_s=0.99 * needed_s / 0.02)
    assert found.shapes == ()
    assert found.reason == ("not measured: timing takes about 0.6 s, more than 0.6 s: 2% of the run, 30.0 s at most")


def test_never_longer_than_the_most():
    assert timing(run_s=1e9).allowed_s == 30.0
    assert timing(run_s=1e9, token_s=1.0).shapes == ()


@pytest.mark.parametrize(("lengths", "most_rows"), [([100] * 9, 1), ([100], 1)])
def test_too_few_shapes(lengths, most_rows):
    found = timing(lengths, most_rows=most_rows)
    assert found.shapes == ()
    assert found.reason == "not measured: only 1 of the shapes that tell something fit under the cap"
