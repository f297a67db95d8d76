"""Gradient clipping."""

import pytest
import torch

from brim.config.schema import GradientClippingConfig
from brim.train import clip_gradients


def parameter(values):
    weight = torch.nn.Parameter(torch.zeros(len(values)))
    weight.grad = torch.tensor(values)
    return weight


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, [3.0, 4.0]),
        (GradientClippingConfig(clipglobalnorm=1.0), [0.6, 0.8]),
        (GradientClippingConfig(clipglobalnorm=10.0), [3.0, 4.0]),
        (GradientClippingConfig(clipglobalnorm=None, clipnorm=1.0), [0.6, 0.8]),
        (GradientClippingConfig(clipglobalnorm=None, clipvalue=3.5), [3.0, 3.5]),
        (GradientClippingConfig(clipglobalnorm=2.5, clipvalue=1.8), [1.5, 1.8]),
    ],
)
def test_gradients_are_clipped_and_the_norm_before_it_comes_back(settings, expected):
    weights = [parameter([3.0]), parameter([4.0])]
    assert float(clip_gradients(weights, settings)) == pytest.approx(5.0)
    assert [float(weight.grad) for weight in weights] == pytest.approx(expected, rel=1e-5)
