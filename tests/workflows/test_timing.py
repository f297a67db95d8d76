"""Shapes that are timed, with a clock that stands still but for what runs, and surfaces through them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.properties import examples

from brim.batching import Costs, Surface
from brim.workflows.training.timing import CALLS, TimeFit, TimeSample, Timing


def line(per_token, fixed=0.0):
    return Surface(base=fixed, lengths=(1,), tokens=((1000,),), values=((fixed + 1000.0 * per_token,),))


# Which shapes are timed: under the cap, of lengths that there are, for a small share of the run

LENGTHS = [48, 60, 118, 118, 130, 200, 452, 512] * 20


def timing(lengths=LENGTHS, *, cap_bytes=10**6, most_rows=32, run_s=1e6, token_s=1e-4):
    costs = Costs(peak=line(1.0), static_bytes=0, time=line(token_s))
    return Timing.of(lengths, costs=costs, cap_bytes=cap_bytes, most_rows=most_rows, run_s=run_s)


def test_the_first_ones_tell_most():
    shapes = timing().shapes
    assert shapes[:4] == ((1, 48), (10, 48), (1, 512), (20, 48))
    assert shapes[-1] == (32, 512)
    tokens = [rows * length for rows, length in shapes[4:]]
    assert tokens == sorted(tokens)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50), st.integers(1, 100_000), st.integers(1, 64))
def test_no_shape_is_over_the_cap_or_made_up(lengths, cap_bytes, most_rows):
    shapes = timing(lengths, cap_bytes=cap_bytes, most_rows=most_rows).shapes
    assert all(r * length <= cap_bytes and r <= most_rows and length in lengths for r, length in shapes)
    assert len(set(shapes)) == len(shapes)


@given(st.lists(st.integers(16, 2000), min_size=20, max_size=50))
def test_the_first_four_tell_a_floor_and_two_slopes_apart(lengths):
    rows, of = np.array(timing(lengths).shapes[:4], dtype=float).T
    features = np.stack([np.ones(4), rows * of / (rows * of).max(), rows * of**2 / (rows * of**2).max()])
    if of.max() >= 2 * of.min():
        assert np.linalg.matrix_rank(features, tol=1e-6) == 3


def test_a_short_run_is_not_measured_nor_too_few_shapes():
    needed_s = CALLS * 1e-4 * (48 + 10 * 48 + 512 + 20 * 48)
    assert timing(run_s=1.01 * needed_s / 0.02).shapes
    assert timing(run_s=1e9, token_s=1.0).shapes == ()
    too_long = "not measured: timing takes about 0.6 s, more than 0.6 s: 2% of the run, 30.0 s at most"
    too_few = "not measured: only 1 of the shapes worth timing fit under the cap"
    short = timing(run_s=0.99 * needed_s / 0.02)
    for found, reason in ((short, too_long), *((timing([100] * n, most_rows=1), too_few) for n in (9, 1))):
        assert (found.shapes, found.reason) == ((), reason)


# Timing them

SHAPES = ((1, 50), (8, 50), (1, 400), (4, 100), (64, 400), (8, 100))


def timed(allowed_s, *, token_s=1e-3):
    """A floor of 10 ms and 1 ms a token; the first call of a shape takes ten times as long."""
    calls, seconds = [], [100.0]

    def run(rows, length):
        seconds.append((1 if (rows, length) in calls else 10) * (0.01 + 1e-3 * rows * length))
        calls.append((rows, length))

    timing = Timing(shapes=SHAPES, allowed_s=allowed_s)
    samples = timing.measured(run, lambda: sum(seconds), predicted=line(token_s))
    return calls, [(sample.rows, sample.length) for sample in samples], samples


def test_the_first_call_is_not_counted_and_what_cannot_be_afforded_is_left_out():
    calls, shapes, samples = timed(1e6)
    assert shapes == list(SHAPES)
    assert calls == [shape for shape in SHAPES for _ in range(CALLS)]
    assert samples[0].seconds == pytest.approx((0.06,) * (CALLS - 1))
    assert TimeFit.through(samples, line(1e-3)).seconds(1000, 100) == pytest.approx(1.01, rel=0.02)
    assert timed(60.0)[1] == [shape for shape in SHAPES if shape != (64, 400)]
    # An estimate that was too low is corrected: by it, 64 rows of 400 would take a tenth of what they take.
    assert (64, 400) not in timed(60.0, token_s=1e-4)[1]
    assert timed(0.1)[1] == [(1, 50)]  # it ends when the time is up


# Surfaces through timed shapes, against the law that the times were made by

TIMED = [(1, 48), (9, 48), (1, 452), (18, 48), (1, 118), (2, 118), (4, 118), (2, 452), (8, 118), (4, 452), (8, 452)]
ROUGH = line(1e-4, 0.001)  # an estimate that knows no attention, of a device twice as fast


def law(num_tokens, length, *, fixed=0.02, token=2e-4, attention=3e-7, bend=(10**9, 0.0)):
    return fixed + (token + attention * length) * num_tokens + bend[1] * max(num_tokens - bend[0], 0)


def samples(noise=0.0, seed=0, shapes=TIMED, **terms):
    """Noise only ever makes a call longer."""
    rng = np.random.default_rng(seed)
    return [
        TimeSample(
            rows=rows,
            length=length,
            seconds=tuple(law(rows * length, length, **terms) * (1 + noise * rng.exponential()) for _ in range(2)),
        )
        for rows, length in shapes
    ]


@given(fixed=st.floats(0, 1), token=st.floats(1e-6, 1e-2), attention=st.sampled_from([0.0, 1e-7, 1e-5]))
@examples(15)
def test_a_law_without_noise_is_found(fixed, token, attention):
    found = TimeFit.through(samples(fixed=fixed, token=token, attention=attention), ROUGH)
    assert found.relative_error < 0.03  # of models as near as that the simplest is taken
    for rows, length in [(3, 100), (16, 64), (1, 452)]:
        expected = law(rows * length, length, fixed=fixed, token=token, attention=attention)
        # That is a root mean square: the worst single shape lies 3.2% off, of a law with a large fixed part.
        assert found.seconds(rows * length, length) == pytest.approx(expected, rel=0.035)


def test_an_estimate_that_is_off_by_a_factor_is_scaled_also_by_few_samples():
    found = TimeFit.through(samples(attention=0.0, noise=0.02), line(1e-4, 0.01))
    assert found.scale == pytest.approx(2.0, rel=0.05)
    assert (found.fixed_s, found.token_s, found.attention_s, found.bends) == (0.0, 0.0, 0.0, ())
    for number in (1, 2, 3):
        found = TimeFit.through(samples(shapes=TIMED[:number]), ROUGH)
        ratios = [law(rows * length, length) / float(ROUGH(rows, length)) for rows, length in TIMED[:number]]
        assert min(ratios) <= found.scale <= max(ratios)
        assert (found.fixed_s, found.token_s, found.attention_s, found.bends) == (0.0, 0.0, 0.0, ())


def test_one_shape_that_was_disturbed_counts_less():
    disturbed = samples()
    spoilt = disturbed[8]  # without weights by residuals the others would be a quarter off
    disturbed[8] = TimeSample(rows=spoilt.rows, length=spoilt.length, seconds=tuple(3 * s for s in spoilt.seconds))
    found = TimeFit.through(disturbed, ROUGH)
    assert found.seconds(1000, 100) == pytest.approx(law(1000, 100), rel=0.05)
    assert TimeSample(rows=1, length=1, seconds=(3.0, 1.0)).median_s == 1.0  # of two the smaller
    assert TimeSample(rows=1, length=1, seconds=(3.0, 1.0, 2.0)).median_s == 2.0


def test_time_that_rises_faster_beyond_a_number_of_tokens_and_a_floor():
    """Such as on a CPU whose caches the activations leave, and of a GPU that waits for the host up to some tokens."""
    bend = (904, 3e-4)
    found = TimeFit.through(samples(bend=bend), ROUGH)
    assert found.bends[0][0] in (864, 904, 944)
    for rows, length in [(1, 48), (1, 452), (4, 452), (16, 118)]:
        assert found.seconds(rows * length, length) == pytest.approx(law(rows * length, length, bend=bend), rel=0.03)
    surface = found.surface(shortest=16, longest=512, most_rows=32)
    for rows, length in [(1, 16), (1, 512), (7, 100), (32, 512), (32, 48)]:
        assert float(surface(rows, length)) == pytest.approx(float(found.seconds(rows * length, length)))
    made = [TimeSample(rows=2**n, length=64, seconds=(max(0.05, 1e-4 * 2**n * 64),)) for n in range(8)]
    found = TimeFit.through(made, line(1e-5, 0.001))
    for tokens, seconds, rel in ((64, 0.05, 0.05), (256, 0.05, 0.1), (8192, 0.8192, 0.05)):
        assert found.seconds(tokens, 64) == pytest.approx(seconds, rel=rel)


@given(seed=st.integers(0, 10**6), noise=st.floats(0, 1))
@examples(15)
def test_whatever_was_measured_the_surface_is_convex_and_rises(seed, noise):
    surface = TimeFit.through(samples(noise=noise, seed=seed), ROUGH).surface(shortest=16, longest=512, most_rows=32)
    lines = [
        np.diff([surface.base, *values]) / np.diff([0, *tokens])
        for tokens, values in zip(surface.tokens, surface.values, strict=True)
    ]
    for slopes in lines:
        assert slopes.min() >= 0
        assert (np.diff(slopes) >= -1e-9 * slopes.max()).all()
    for shorter, longer in pairwise(lines):
        assert (longer >= shorter - 1e-12).all()
