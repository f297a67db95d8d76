import pytest
import torch

from brim.memory.cuda import CudaTarget
from brim.memory.cuda.attention import num_splits, split_buffers

A100 = CudaTarget(compute_capability=(8, 0), multiprocessors=108)


@pytest.mark.parametrize(
    ("blocks", "key_blocks", "expected"),
    [
        (173, 64, 1),  # four fifths of 216 slots are busy
        (32, 1, 1),  # nothing to split
        (32, 32, 6),  # 192 of 216 slots; one more would need a second wave
        (1, 300, 100),  # at most 128, and as few as do 85% of the best
    ],
)
def test_the_fewest_splits_that_use_the_device_nearly_best(blocks, key_blocks, expected):
    assert num_splits(blocks, 216, key_blocks) == expected


@pytest.mark.usefixtures("fake")
def test_one_token_of_32_heads_over_4096_keys_is_split():
    like = torch.empty(1, 1, 32, 128, dtype=torch.bfloat16)
    log_sum_exps, outputs = split_buffers(1, 32, 1, 4096, 128, dropout=0.0, like=like, target=A100)
    assert log_sum_exps.shape == (6, 1, 32, 1)
    assert outputs.shape == (6, 1, 32, 1, 128)
    assert outputs.dtype == torch.float32


@pytest.mark.usefixtures("fake")
def test_dropout_and_unknown_devices_are_not_split():
    like = torch.empty(1, 1, 32, 128, dtype=torch.bfloat16)
    unknown = CudaTarget(compute_capability=(8, 0))
    assert split_buffers(1, 32, 1, 4096, 128, dropout=0.1, like=like, target=A100) == ()
    assert split_buffers(1, 32, 1, 4096, 128, dropout=0.0, like=like, target=unknown) == ()
