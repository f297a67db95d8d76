"""The gradient's noise, estimated from gradients whose noise is known; and the batch that follows it."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.batching import Adaptation, NoiseMeasurement, NoiseScale

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
    return NoiseMeasurement.of(
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


def test_measurements_by_hand_and_none():
    # Shares (3, 0) and (1, 2) with weights 3 : 1, whose sum is (4, 2).
    two = NoiseMeasurement.of(squared_sum=20.0, squared_shares=[9.0, 5.0], weights=[30, 10], num_rows=6)
    assert two.squared_gradient == pytest.approx(2 * 3 / (1 - 9 / 16 - 1 / 16))
    assert two.gradient_variance == pytest.approx(6 * (20 - 16))
    equal = measured(np.tile(GRADIENT, (12, 1)), UNEQUAL, [1, 2, 3, 6])
    assert equal.squared_gradient == pytest.approx(SQUARED)
    assert equal.gradient_variance == pytest.approx(0, abs=1e-12)
    infinite = [(value, [1.0, 2.0], [1, 1]) for value in (math.nan, math.inf)]
    infinite += [(2.0, [1.0, value], [1, 1]) for value in (math.nan, math.inf)]
    for squared, shares, weights in (*infinite, (1.0, [1.0], [5]), (1.0, [1.0, 1.0], [5, 0])):  # or one group
        given = {"squared_sum": squared, "squared_shares": shares, "weights": weights}
        assert NoiseMeasurement.of(**given, num_rows=2) is None


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
def test_it_is_known_from_five_measurements_on(squared, variance, rows, is_at_least, is_at_most):
    noise, known = NoiseScale(), []
    for _ in range(5):
        noise = noise.after(measurement(squared, variance))
        decided = [noise.is_at_least(n) or noise.is_at_most(n) for n in (32, 64, 65)]
        known.append((noise.rows, noise.in_words(), decided))
    unknown = "noise scale not known yet, after {} of 5 measurements"
    assert known[:4] == [(None, unknown.format(number), [False] * 3) for number in (1, 2, 3, 4)]
    told = "larger than the measured batches can tell" if rows is None else f"{rows:.1f} rows"
    assert noise.in_words() == f"noise scale {told}"
    assert noise.rows == (None if rows is None else pytest.approx(rows))
    noise = replace(noise, squared_gradient=squared, gradient_variance=variance)  # to the bit
    assert [noise.is_at_least(each) for each in (32, 64, 65)] == is_at_least
    assert [noise.is_at_most(each) for each in (32, 64, 65)] == is_at_most


# The batch that follows it


def noise(rows, num_measurements=5):
    return NoiseScale(num_measurements=num_measurements, squared_gradient=1.0, gradient_variance=float(rows))


def adaptation(size, smallest=32, largest=200):
    return Adaptation(size=size, smallest=smallest, largest=largest)


NOISE = NoiseScale(num_measurements=9, squared_gradient=-0.1, gradient_variance=0.1)


@pytest.mark.parametrize(
    ("start", "scales", "expected"),
    [
        (64, [128] * 4, [64, 64, 128, 128]),  # at least the next rung, three times in a row
        (64, [127.9] * 9, [64] * 9),
        (64, [32] * 3, [64, 64, 32]),
        (64, [32.1] * 9, [64] * 9),
        (64, [500, 500, 100, 500, 500, 500], [64] * 5 + [128]),  # once undecided: votes begin again
        (64, [500, 500, 20, 500, 500, 500], [64] * 5 + [128]),
        (64, [500] * 7, [64, 64, 128, 128, 128, 200, 200]),  # and after a move; the last rung need not be a doubling
        (200, [0] * 12, [200, 200, 128, 128, 128, 64, 64, 64, 32, 32, 32, 32]),
        (64, [128, 128, 128, 65, 65, 65, 65], [64, 64] + [128] * 5),  # not back within a factor of two
        (64, [128, 128, 128, 64, 64, 64], [64, 64, 128, 128, 128, 64]),
        (48, [64] * 3, [48, 48, 64]),  # from between two rungs
        (48, [32] * 3, [48, 48, 32]),
        (64, [NOISE] * 3, [64, 64, 128]),
        (64, [noise(1e6, number) for number in range(1, 8)], [64] * 6 + [128]),  # not before it is known
    ],
)
def test_moves(start, scales, expected):
    now, seen = adaptation(start), []
    for scale in scales:
        now = now.after(scale if isinstance(scale, NoiseScale) else noise(scale))
        seen.append(now.size)
    assert seen == expected


@given(
    scales=st.lists(st.sampled_from([0, 10, 32, 40, 64, 90, 128, 300, 1000]), max_size=40),
    smallest=st.integers(1, 64),
    factor=st.integers(1, 20),
)
def test_a_saved_one_goes_on_the_same_and_stays_within_its_bounds(scales, smallest, factor):
    largest = smallest * factor - factor // 2
    one = other = adaptation(smallest, smallest, max(smallest, largest))
    for rows in scales:
        before = one.size
        one = one.after(noise(rows))
        other = Adaptation(**json.loads(json.dumps(asdict(other)))).after(noise(rows))
        assert one == other
        assert one.size in one.ladder
        assert one.size == before or abs(one.ladder.index(one.size) - one.ladder.index(before)) == 1
