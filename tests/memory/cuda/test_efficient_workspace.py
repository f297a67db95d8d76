import pytest
import torch

from brim.memory.cuda import CudaTarget
from brim.memory.cuda.attention import Tile, tile_of, workspace_bytes


@pytest.mark.parametrize(
    ("head_dim", "half", "sm", "expected"),
    [
        (32, True, (8, 0), Tile(queries=64, keys=64, widest=32)),
        (64, True, (8, 0), Tile(queries=64, keys=64, widest=64)),
        (96, True, (8, 9), Tile(queries=128, keys=64, widest=96)),
        (96, True, (8, 0), Tile(queries=128, keys=128, widest=128)),
        (128, True, (8, 0), Tile(queries=128, keys=128, widest=128)),
        (128, True, (8, 9), Tile(queries=64, keys=64, widest=128)),
        (128, True, (7, 5), Tile(queries=128, keys=64, widest=128)),
        (128, False, (7, 5), Tile(queries=64, keys=64, widest=128)),
        (128, False, (8, 0), Tile(queries=128, keys=64, widest=128)),
        (256, True, (8, 0), Tile(queries=128, keys=64, widest=None)),
    ],
)
def test_the_kernel_that_takes_the_head_dimension(head_dim, half, sm, expected):
    assert tile_of(head_dim, half=half, dropout=False, target=CudaTarget(compute_capability=sm)) == expected


def size(dim=64, dtype=torch.bfloat16, rows=2, heads=8, tokens=512, sm=(8, 0), **changes):
    target = CudaTarget(compute_capability=sm, **changes)
    return workspace_bytes(
        rows=rows, heads=heads, queries=tokens, keys=tokens, head_dim=dim, value_dim=dim, dtype=dtype, dropout=False,
        target=target,
    )  # fmt: skip


def test_the_gradient_of_queries_is_accumulated_in_fp32_tiles():
    assert size() == 4 * 2 * 8 * 8 * (64 * 64 + 4)


def test_wide_heads_accumulate_the_gradients_of_keys_and_values_for_each_split():
    tiles = 4 * 4 * (128 * 64 + 4)  # 4 blocks of 128 queries, 4 of 64 of the 256 dimensions
    splits = 8  # 512 keys by 64; up to 200 over 16 rows and heads
    assert size(256) == 4 * 2 * 8 * (tiles + splits * 64 * (256 + 256))
    assert size(256, deterministic=True) == 4 * 2 * 8 * (tiles + 64 * (256 + 256))


def test_fp32_gradients_are_their_own_accumulators():
    assert size(128, torch.float32) == 4 * 2 * 8 * (4 * 2) * (128 * 64 + 4)
