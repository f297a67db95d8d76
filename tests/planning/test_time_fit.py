"""Surfaces through timed shapes, against the law that the times were made by."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.properties import examples

from brim.batching import Surface
from brim.planning.costs import fit_time
from brim.planning.costs.timing import TimeSample

SHAPES = [(1, 48), (9, 48), (1, 452), (18, 48), (1, 118), (2, 118), (4, 118), (2, 452), (8, 118), (4, 452), (8, 452)]


def law(num_tokens, length, *, fixed=0.02, token=2e-4, attention=3e-7, bend=(10**9, 0.0)):
    return fixed + (token + attention * length) * num_tokens + bend[1] * max(num_tokens - bend[0], 0)


def line(fixed, token):
    return Surface(base=fixed, lengths=(512,), tokens=((1000,),), values=((fixed + 1000 * token,),))


ROUGH = line(0.001, 1e-4)  # an estimate that knows no attention, of a device twice as fast


def samples(noise=0.0, seed=0, shapes=SHAPES, calls=2, **terms):
    """Noise only ever makes a call longer."""
    rng = np.random.default_rng(seed)
    return [
        TimeSample(
            rows=rows,
            length=length,
            seconds=tuple(law(rows * length, length, **terms) * (1 + noise * rng.exponential()) for _ in range(calls)),
        )
        for rows, length in shapes
    ]


@given(
    fixed=st.floats(0, 1), token=st.floats(1e-6, 1e-2), attention=st.sampled_from([0.0, 1e-7, 1e-5])
)  # fmt: skip
@examples(15)
def test_a_law_without_noise_is_found(fixed, token, attention):
    found = fit_time(samples(fixed=fixed, token=token, attention=attention), ROUGH)
    assert found.relative_error < 0.03  # of models as near as that the simplest is taken
    for rows, length in [(3, 100), (16, 64), (1, 452)]:
        expected = law(rows * length, length, fixed=fixed, token=token, attention=attention)
        # That is a root mean square: the worst single shape lies 3.2% off, of a law with a large fixed part.
        assert found.seconds(rows * length, length) == pytest.approx(expected, rel=0.035)


def test_an_estimate_that_is_off_by_a_factor_is_scaled():
    found = fit_time(samples(attention=0.0, noise=0.02), line(0.01, 1e-4))
    assert found.scale == pytest.approx(2.0, rel=0.05)
    assert (found.fixed_s, found.token_s, found.attention_s, found.bends) == (0.0, 0.0, 0.0, ())
    assert found.num_samples == len(SHAPES)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_some_percent_moves_times_by_as_little(seed):
    found = fit_time(samples(noise=0.05, seed=seed), ROUGH)
    for rows, length in [(1, 64), (3, 100), (32, 64), (1, 512), (16, 452)]:
        assert found.seconds(rows * length, length) == pytest.approx(law(rows * length, length), rel=0.12)


def test_one_shape_that_was_disturbed_counts_less():
    disturbed = samples()
    spoilt = disturbed[6]
    disturbed[6] = TimeSample(rows=spoilt.rows, length=spoilt.length, seconds=tuple(3 * s for s in spoilt.seconds))
    found = fit_time(disturbed, ROUGH)
    assert found.seconds(1000, 100) == pytest.approx(law(1000, 100), rel=0.05)
    assert found.relative_error > 0.15


def test_time_that_rises_faster_beyond_a_number_of_tokens():
    """Such as on a CPU whose caches the activations leave."""
    bend = (904, 3e-4)
    found = fit_time(samples(bend=bend), ROUGH)
    assert found.bends[0][0] in (864, 904, 944)
    for rows, length in [(1, 48), (1, 452), (4, 452), (16, 118)]:
        assert found.seconds(rows * length, length) == pytest.approx(law(rows * length, length, bend=bend), rel=0.03)


def test_a_floor():
    """A GPU that waits for the host takes the same time up to some tokens."""
    shapes = [(2**power, 64) for power in range(8)]
    made = [TimeSample(rows=rows, length=length, seconds=(max(0.05, 1e-4 * rows * length),)) for rows, length in shapes]
    found = fit_time(made, line(0.001, 1e-5))
    assert found.seconds(64, 64) == pytest.approx(0.05, rel=0.05)
    assert found.seconds(256, 64) == pytest.approx(0.05, rel=0.1)
    assert found.seconds(8192, 64) == pytest.approx(0.8192, rel=0.05)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_samples_scale_the_estimate(number):
    found = fit_time(samples(shapes=SHAPES[:number]), ROUGH)
    ratios = [law(rows * length, length) / float(ROUGH(rows, length)) for rows, length in SHAPES[:number]]
    assert min(ratios) <= found.scale <= max(ratios)
    assert (found.fixed_s, found.token_s, found.attention_s, found.bends) == (0.0, 0.0, 0.0, ())


@given(seed=st.integers(0, 10**6), noise=st.floats(0, 1))
@examples(15)
def test_whatever_was_measured_the_surface_is_convex_and_rises(seed, noise):
    surface = fit_time(samples(noise=noise, seed=seed), ROUGH).surface(shortest=16, longest=512, most_rows=32)
    lines = [
        np.diff([surface.base, *values]) / np.diff([0, *tokens])
        for tokens, values in zip(surface.tokens, surface.values, strict=True)
    ]
    for slopes in lines:
        assert slopes.min() >= 0
        assert (np.diff(slopes) >= -1e-9 * slopes.max()).all()
    for shorter, longer in pairwise(lines):
        assert (longer >= shorter - 1e-12).all()


def test_the_surface_is_the_law():
    found = fit_time(samples(bend=(904, 3e-4)), ROUGH)
    surface = found.surface(shortest=16, longest=512, most_rows=32)
    for rows, length in [(1, 16), (1, 512), (7, 100), (32, 512), (32, 48)]:
        assert float(surface(rows, length)) == pytest.approx(float(found.seconds(rows * length, length)))


def test_a_median_of_two_is_the_smaller():
    assert TimeSample(rows=1, length=1, seconds=(3.0, 1.0)).median_s == 1.0
    assert TimeSample(rows=1, length=1, seconds=(3.0, 1.0, 2.0)).median_s == 2.0
