"""What each precision means for weights, arithmetic and the loss scale."""

import pytest
import torch

from brim.models.precision import precision


@pytest.mark.parametrize(
    ("name", "trained", "frozen", "arithmetic", "scales_loss"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32, False),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
        ("bf16-mixed", torch.float32, None, torch.bfloat16, False),
        ("fp16-mixed", torch.float32, None, torch.float16, True),
    ],
)
def test_a_precision_is_these_three_things(name, trained, frozen, arithmetic, scales_loss):
    kind = precision(name)
    assert kind.weights_dtype(frozen=False) == trained
    assert kind.weights_dtype(frozen=True) == frozen  # None: as stored
    assert kind.scales_loss is scales_loss
    layer = torch.nn.Linear(4, 4, dtype=trained)
    with kind.autocast(torch.device("cpu")):
        assert layer(torch.ones(1, 4, dtype=trained)).dtype == arithmetic
