"""The conditions of sdp_utils.cpp, one row each."""

import pytest
import torch

from brim.memory.cuda import CudaTarget
from brim.memory.cuda.sdpa import Attention, choose

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def call(dtype=BRAIN, heads=8, kv_heads=8, queries=64, keys=64, dim=64, value_dim=None, **changes):
    query = (2, heads, queries, dim)
    key = (2, kv_heads, keys, dim)
    return Attention(query=query, key=key, value=(*key[:3], value_dim or dim), dtype=dtype, **changes)


@pytest.mark.parametrize(
    ("why", "sm", "expected", "given"),
    [
        ("half precision without a mask on Ampere", (8, 0), "flash", call(is_causal=True)),
        ("fp32 is not flash's: check_dtypes_low_precision", (8, 0), "efficient", call(FULL)),
        ("no flash before sm80: check_flash_attention_hardware_support", (7, 5), "efficient", call(HALF)),
        ("no bf16 before sm80: less_than_sm80_mem_efficient_dtypes", (7, 5), "math", call(BRAIN)),
        ("a mask is not flash's: check_for_attn_mask", (8, 0), "efficient", call(mask=(2, 1, 64, 64))),
        ("causal needs as many keys: check_flash_causal_non_square_seqlens", (8, 0), "efficient", call(keys=96, is_causal=True)),
        ("grouped queries are flash's", (8, 0), "flash", call(kv_heads=2, enable_gqa=True)),
        ("grouped queries are not the efficient kernel's before 2.14", (8, 0), "math", call(FULL, kv_heads=2, enable_gqa=True)),
        ("heads that differ without enable_gqa", (8, 0), "math", call(kv_heads=2)),
        ("head dimensions above 256: check_head_dim_size_flash", (8, 0), "efficient", call(dim=320)),
        ("values of another width: check_head_dim_size_flash", (8, 0), "efficient", call(dim=192, value_dim=128)),
        ("flash pads widths that are no multiple of 8", (8, 0), "flash", call(dim=84)),
        ("the efficient kernel does not: minimum_gemm_alignment", (8, 0), "math", call(dim=84, mask=(2, 1, 64, 64))),
        ("fp32 on Ampere in fours", (8, 0), "efficient", call(FULL, dim=84)),
        ("training at 224 on Ada", (8, 9), "efficient", call(dim=224, needs_gradient=True)),
        ("scoring at 224 on Ada", (8, 9), "flash", call(dim=224)),
        ("training at 256 on Ada", (8, 9), "flash", call(dim=256, needs_gradient=True)),
        ("with dropout at 256 on Ada", (8, 9), "efficient", call(dim=256, needs_gradient=True, dropout=0.1)),
        ("training at 224 on a consumer Blackwell", (12, 0), "efficient", call(dim=224, needs_gradient=True)),
        ("cuDNN first on Hopper: check_prefer_cudnn_attention", (9, 0), "cudnn", call(is_causal=True)),
        ("with a mask, too", (9, 0), "cudnn", call(mask=(2, 1, 64, 64))),
        ("grouped queries, too", (9, 0), "cudnn", call(kv_heads=2, enable_gqa=True)),
        ("a mask that trains: check_attn_mask_shape", (9, 0), "efficient", call(mask=(2, 8, 64, 64), mask_needs_gradient=True)),
        ("not by multiples of 8: check_cudnn_tensor_shapes", (9, 0), "flash", call(dim=84)),
        ("one key: check_cudnn_tensor_shapes", (9, 0), "flash", call(queries=1, keys=1)),
        ("fp32 on Hopper", (9, 0), "efficient", call(FULL)),
        ("cuDNN first on data-centre Blackwell", (10, 0), "cudnn", call()),
        ("up to 128 there", (10, 0), "flash", call(dim=256)),
        ("256 on Hopper", (9, 0), "cudnn", call(dim=256)),
        ("a last dimension that is not dense: check_last_dim_stride_equals_1_dense", (8, 0), "math", call(last_strides=(64, 1, 1))),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_the_kernel_is_the_first_that_can(why, sm, expected, given):
    assert choose(given, CudaTarget(compute_capability=sm, torch_version=(2, 13))) == expected


def test_the_wheels_of_torch_2_10_carry_an_older_cudnn():
    assert choose(call(), CudaTarget(compute_capability=(9, 0), torch_version=(2, 10))) == "flash"


def test_the_efficient_kernel_groups_queries_from_torch_2_14_on():
    grouped = call(FULL, kv_heads=2, enable_gqa=True)
    assert choose(grouped, CudaTarget(compute_capability=(8, 0), torch_version=(2, 14))) == "efficient"


def test_deterministic_algorithms_leave_cudnn_out():
    target = CudaTarget(compute_capability=(9, 0), torch_version=(2, 13), deterministic=True)
    assert choose(call(), target) == "flash"
