"""Curves of several seeds as one."""

import numpy as np
import pytest

from brim.report.curves import of_evaluations, of_training
from brim.train import Curve


def curve(tokens, loss, weights=None):
    return Curve(tokens=tuple(tokens), loss=tuple(loss), weights=tuple(weights or [1] * len(tokens)))


def test_training_losses_are_weighted_means_in_equal_stretches():
    """Ends of 40 and 80: the stretches are shares of each run, drawn at the mean run's tokens."""
    one = curve([10, 20, 30, 40], [4.0, 2.0, 1.0, 3.0], [1, 3, 1, 1])
    other = curve([20, 40, 60, 80], [5.0, 5.0, 5.0, 5.0])
    found = of_training([one, other], num_bins=2)
    assert found.tokens.tolist() == [15.0, 45.0]
    assert found.low.tolist() == [2.5, 2.0]
    assert found.high.tolist() == [5.0, 5.0]
    assert found.mean.tolist() == [3.75, 3.5]


def test_a_stretch_that_a_run_skips_is_the_others():
    found = of_training([curve([60, 100], [2.0, 1.0]), curve([25, 50, 75, 100], [4.0, 3.0, 2.0, 1.0])], num_bins=4)
    assert found.tokens.tolist() == [12.5, 37.5, 62.5, 87.5]
    assert found.mean.tolist() == [4.0, 2.5, 2.0, 1.0]
    nobody = of_training([curve([60, 100], [2.0, 1.0])], num_bins=4)
    assert nobody.tokens.tolist() == [37.5, 87.5]


def test_evaluations_after_as_many_steps_go_together():
    found = of_evaluations([curve([10, 20], [3.0, 1.0]), curve([12, 22], [4.0, 3.0])])
    assert found.tokens.tolist() == [11.0, 21.0]
    assert (found.mean.tolist(), found.low.tolist(), found.high.tolist()) == ([3.5, 2.0], [3.0, 1.0], [4.0, 3.0])


def test_evaluations_at_other_places_are_drawn_straight():
    found = of_evaluations([curve([10, 20], [3.0, 1.0]), curve([10, 15, 30], [3.0, 3.0, 0.0])])
    assert found.tokens.tolist() == [10.0, 20.0]
    assert found.mean == pytest.approx(np.array([3.0, 1.5]))
