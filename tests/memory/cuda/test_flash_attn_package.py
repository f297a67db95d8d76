"""Bytes of the flash-attn package against closed forms. B=2 rows, H=8 heads, T=160 tokens, D=64."""

import pytest
import torch

from brim.memory.cuda import CudaTarget, FlashAttnPackage

pytestmark = pytest.mark.usefixtures("fake")

B, H, T, D = 2, 8, 160, 64
N = B * T
OUT = 2 * N * H * D
TARGET = CudaTarget(compute_capability=(8, 0))


def inputs(*shape, kv_heads=H, dim=D):
    return [
        torch.empty(*shape, heads, dim, dtype=torch.bfloat16, requires_grad=True) for heads in (H, kv_heads, kv_heads)
    ]


def sizes(births, tensors, run):
    with births() as forward:
        out = run(*tensors)
    grad = torch.empty(out.shape, dtype=out.dtype)
    with births() as backward:
        grads = torch.autograd.grad(out, tensors, grad)
    assert [each.shape for each in grads] == [each.shape for each in tensors]
    assert out.shape == tensors[0].shape
    return forward.sizes, sorted(backward.sizes)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_rows_of_one_length(births, kv_heads):
    run = FlashAttnPackage(target=TARGET).flash_attn_func
    forward, backward = sizes(births, inputs(B, T, kv_heads=kv_heads), run)
    small = OUT * kv_heads // H
    expanded = [OUT, OUT] if kv_heads != H else []
    assert forward == [OUT, 4 * B * H * T, 16]
    assert backward == sorted([OUT, small, small, *expanded, 4 * B * H * 256, 4 * B * H * 256 * D])


@pytest.mark.parametrize(
    ("version", "log_sum_exp", "row_sums"),
    [
        ((2, 8, 3), 4 * H * N, 4 * H * (N + 128 * B)),
        ((2, 5, 8), 4 * B * H * 200, 4 * B * H * 256),  # padded to the longest row, of 200 tokens
    ],
    ids=["2.8.3", "2.5.8"],
)
def test_rows_of_different_lengths(births, version, log_sum_exp, row_sums):
    lengths = torch.empty(B + 1, dtype=torch.int32)

    def run(q, k, v):
        package = FlashAttnPackage(target=TARGET, version=version)
        return package.flash_attn_varlen_func(q, k, v, lengths, lengths, 200, 200)

    forward, backward = sizes(births, inputs(N), run)
    assert forward == [OUT, log_sum_exp, 16]
    assert backward == sorted([OUT] * 3 + [row_sums, 4 * (N + 128 * B) * H * D])


def test_head_dimensions_are_padded_to_8_and_cut_again(births):
    run = FlashAttnPackage(target=TARGET).flash_attn_func
    forward, backward = sizes(births, inputs(B, T, dim=84), run)
    padded = 2 * N * H * 88
    assert forward == [padded] * 4 + [4 * B * H * T, 16]
    assert backward == sorted([padded] * 4 + [4 * B * H * 256, 4 * B * H * 256 * 96])
