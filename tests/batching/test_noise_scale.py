"""Estimates of the gradient's noise, on gradients whose noise is known."""

import json
import math

import numpy as np
import pytest

from brim.batching import NoiseMeasurement, NoiseScale, measure

DIMENSIONS = 20
GRADIENT = np.linspace(-0.3, 0.5, DIMENSIONS)
DEVIATIONS = np.linspace(0.1, 2.0, DIMENSIONS)  # of a row's gradient, by dimension
TRACE = float((DEVIATIONS**2).sum())
SQUARED = float((GRADIENT**2).sum())
UNEQUAL = np.array([1, 7, 30, 2, 2, 90, 15, 4, 60, 11, 3, 25])  # supervised tokens of rows
EQUAL = np.full(12, 9)


def draw(random, tokens, variance_by_tokens=lambda tokens: 1.0):
    """Row gradients [rows, dimensions], independent of each other."""
    scale = np.sqrt([variance_by_tokens(count) for count in tokens])[:, None]
    return GRADIENT + scale * DEVIATIONS * random.standard_normal((len(tokens), DIMENSIONS))


def measured(rows, tokens, groups):
    """The measurement of a batch that is cut after these numbers of rows."""
    shares = rows * (tokens / tokens.sum())[:, None]
    parts = np.split(np.arange(len(tokens)), np.cumsum(groups)[:-1])
    return measure(
        squared_sum=float((shares.sum(0) ** 2).sum()),
        squared_shares=[float((shares[part].sum(0) ** 2).sum()) for part in parts],
        weights=[int(tokens[part].sum()) for part in parts],
        num_rows=len(tokens),
    )


@pytest.mark.parametrize("groups", [[1] * 12, [3, 3, 3, 3], [1, 2, 3, 6], [11, 1]], ids=str)
@pytest.mark.parametrize("tokens", [EQUAL, UNEQUAL], ids=["equal weights", "unequal weights"])
@pytest.mark.parametrize("by_tokens", [False, True], ids=["noise by row", "noise by token"])
def test_estimates_are_unbiased(groups, tokens, by_tokens):
    """Whether a row's tokens have their noise in common, or each its own, so that long rows have less of it."""
    random = np.random.default_rng(3)
    variance = (lambda count: 5 / count) if by_tokens else (lambda count: 1.0)
    estimates = [measured(draw(random, tokens, variance), tokens, groups) for _ in range(2000)]
    of_batch = sum((count / tokens.sum()) ** 2 * variance(count) for count in tokens)
    for name, expected in (("squared_gradient", SQUARED), ("gradient_variance", 12 * of_batch * TRACE)):
        values = np.array([getattr(estimate, name) for estimate in estimates])
        standard_error = values.std(ddof=1) / math.sqrt(len(values))
        assert abs(values.mean() - expected) < 4 * standard_error
        assert standard_error < 0.1 * expected  # or much that is wrong would pass


def test_equal_rows_of_known_covariance_have_the_noise_scale_of_the_paper():
    """tr Σ / |G|², whatever the batch."""
    random = np.random.default_rng(5)
    for num_rows in (4, 40):
        tokens = np.full(num_rows, 9)
        estimates = [measured(draw(random, tokens), tokens, [num_rows // 4] * 4) for _ in range(2500)]
        variance = np.mean([estimate.gradient_variance for estimate in estimates])
        assert variance == pytest.approx(TRACE, rel=0.03)


def test_two_groups_by_hand():
    """Shares (3, 0) and (1, 2) with weights 3 : 1; their sum is (4, 2)."""
    measurement = measure(squared_sum=20.0, squared_shares=[9.0, 5.0], weights=[30, 10], num_rows=6)
    assert measurement.squared_gradient == pytest.approx(2 * 3 / (1 - 9 / 16 - 1 / 16))
    assert measurement.gradient_variance == pytest.approx(6 * (20 - 16))


def test_equal_gradients_have_no_noise():
    measurement = measured(np.tile(GRADIENT, (12, 1)), UNEQUAL, [1, 2, 3, 6])
    assert measurement.squared_gradient == pytest.approx(SQUARED)
    assert measurement.gradient_variance == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_measurement(value):
    assert measure(squared_sum=value, squared_shares=[1.0, 2.0], weights=[1, 1], num_rows=2) is None
    assert measure(squared_sum=2.0, squared_shares=[1.0, value], weights=[1, 1], num_rows=2) is None


@pytest.mark.parametrize("weights", [[5], [5, 0]])
def test_one_group_is_no_measurement(weights):
    assert measure(squared_sum=1.0, squared_shares=[1.0] * len(weights), weights=weights, num_rows=2) is None


def measurement(squared_gradient, gradient_variance):
    return NoiseMeasurement(squared_gradient=squared_gradient, gradient_variance=gradient_variance)


def test_the_average_is_the_weighted_mean_whose_weights_halve_in_ten_measurements():
    random = np.random.default_rng(1)
    values = random.standard_normal((60, 2))
    noise = NoiseScale()
    for number, pair in enumerate(values.tolist(), start=1):
        noise = noise.after(measurement(*pair))
        weights = 0.5 ** (np.arange(number)[::-1] / 10)
        expected = np.average(values[:number], axis=0, weights=weights)
        assert [noise.squared_gradient, noise.gradient_variance] == pytest.approx(expected.tolist())
        assert noise.num_measurements == number


def test_the_smoothed_ratio_converges():
    """A batch of 12 rows where the noise scale is 21: one measurement says little, the average says it."""
    random = np.random.default_rng(2)
    noise, seen, single = NoiseScale(), [], []
    for _ in range(1500):
        one = measured(draw(random, EQUAL), EQUAL, [2, 2, 2, 2, 1, 1, 1, 1])
        noise = noise.after(one)
        single.append(one.gradient_variance / one.squared_gradient)
        seen.append(noise.rows)
    assert pytest.approx(20.81, abs=0.01) == TRACE / SQUARED
    assert np.median(seen[50:]) == pytest.approx(TRACE / SQUARED, rel=0.1)
    far = np.abs(np.log(np.abs(single)) - math.log(TRACE / SQUARED)) > math.log(2)
    assert np.mean(far) > 0.2
    known = np.array([rows or math.inf for rows in seen[50:]])
    assert np.mean(np.abs(np.log(known) - math.log(TRACE / SQUARED)) > math.log(2)) < 0.02


def test_it_is_not_known_before_five_measurements():
    noise = NoiseScale()
    known = []
    for _ in range(6):
        noise = noise.after(measurement(2.0, 60.0))
        known.append((noise.rows, noise.is_at_least(30), noise.is_at_most(30)))
    assert known[:4] == [(None, False, False)] * 4
    assert known[4:] == [(pytest.approx(30), True, True)] * 2
    assert not noise.is_at_least(31)
    assert not noise.is_at_most(29)


@pytest.mark.parametrize(
    ("squared", "variance", "rows", "is_at_least", "is_at_most"),
    [
        (1.0, 64.0, 64.0, [True, True, False], [False, True, True]),
        (0.0, 64.0, None, [True] * 3, [False] * 3),  # all noise
        (-1.0, 64.0, None, [True] * 3, [False] * 3),
        (1.0, -2.0, 0.0, [False] * 3, [True] * 3),  # all signal
        (-1.0, -2.0, None, [False] * 3, [False] * 3),
    ],
)
def test_where_one_of_the_averages_is_not_positive(squared, variance, rows, is_at_least, is_at_most):
    noise = NoiseScale(num_measurements=5, squared_gradient=squared, gradient_variance=variance)
    assert noise.rows == rows
    assert [noise.is_at_least(each) for each in (32, 64, 65)] == is_at_least
    assert [noise.is_at_most(each) for each in (32, 64, 65)] == is_at_most


@pytest.mark.parametrize(
    ("num_measurements", "squared", "words"),
    [
        (4, 1.0, "noise scale not known yet, after 4 of 5 measurements"),
        (5, 0.5, "noise scale 2469.0 rows"),
        (5, -0.5, "noise scale larger than the measured batches can tell"),
    ],
)
def test_in_words(num_measurements, squared, words):
    noise = NoiseScale(num_measurements=num_measurements, squared_gradient=squared, gradient_variance=1234.5)
    assert noise.in_words() == words


def test_a_saved_noise_scale_goes_on_to_the_bit():
    random = np.random.default_rng(4)
    one = other = NoiseScale()
    for pair in random.standard_normal((40, 2)).tolist():
        one = one.after(measurement(*pair))
        other = NoiseScale.from_dict(json.loads(json.dumps(other.as_dict()))).after(measurement(*pair))
        assert one == other
