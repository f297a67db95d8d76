"""The benchmark of the noise measurements, on rows whose gradients are drawn."""

import numpy as np
import pytest
from benchmarks.noise_accuracy import WAYS, Pool, accuracy


def make_pool():
    """Rows whose gradient points elsewhere the longer they are, and has less noise."""
    random = np.random.default_rng(0)
    lengths = random.integers(5, 100, 150)
    common, by_length = random.standard_normal((2, 40)) / 4
    gradients = common + by_length * (lengths[:, None] / 50 - 1)
    gradients += random.standard_normal((150, 40)) * np.sqrt(20 / lengths)[:, None]
    sums = gradients * lengths[:, None]
    return Pool(lengths=lengths, weights=lengths, products=sums @ sums.T), sums


def test_what_is_true_of_a_pool():
    pool, sums = make_pool()
    mean = sums.sum(0) / pool.weights.sum()
    assert pool.squared_gradient == pytest.approx((mean**2).sum())
    random = np.random.default_rng(1)
    batches = random.integers(0, 150, (3000, 64))
    of_batches = sums[batches].sum(1) / pool.weights[batches].sum(1)[:, None]
    assert 64 * ((of_batches - mean) ** 2).sum(1).mean() == pytest.approx(pool.gradient_variance, rel=0.03)
    noise = (sums - np.outer(pool.weights, mean)) / pool.weights.mean()
    covariance = noise.T @ noise / 150
    dimensions = np.trace(covariance) ** 2 / np.trace(covariance @ covariance)
    assert pool.effective_dimensions == pytest.approx(dimensions)


def test_only_random_groups_and_no_word_on_covariances_find_it():
    pool, _ = make_pool()
    found = {way.name: accuracy(way, pool, 64, 250) for way in WAYS}
    assert found["8 random groups"].noise_scale == pytest.approx(1, abs=0.1)
    assert found["each row by itself"].noise_scale == pytest.approx(1, abs=0.1)
    assert found["8 groups by length"].noise_scale > 1.2
    assert found["each row by itself, one covariance"].noise_scale > 1.2
    assert found["8 groups by length, one covariance"].noise_scale > 1.2
