"""Bytes that attention allocates against closed forms. B=2 rows, H=8 heads, T=160 tokens, D=64."""

import pytest
import torch
from torch.nn import functional

from brim.memory.cuda import CudaTarget
from brim.memory.cuda.dispatch import cuda_kernels

pytestmark = pytest.mark.usefixtures("fake")

B, H, T, D = 2, 8, 160, 64
ROUNDED = 256  # T, in blocks of 128
OUT = 2 * B * H * T * D  # bf16
LSE = 4 * B * H * T


def inputs(dtype=torch.bfloat16, kv_heads=H, dim=D):
    """Laid out as a decoder layer's: [B, T, H, D] in memory, seen as [B, H, T, D]."""
    return [
        torch.empty(B, T, heads, dim, dtype=dtype, requires_grad=True).transpose(1, 2)
        for heads in (H, kv_heads, kv_heads)
    ]


def run(births, target, tensors, **options):
    """Sizes born in the forward and in the backward pass, and the name of the output's gradient function."""
    with cuda_kernels(target):
        grad = torch.empty(B, T, H, tensors[0].shape[-1], dtype=tensors[0].dtype).transpose(1, 2)
        with births() as forward:
            out = functional.scaled_dot_product_attention(*tensors, **options)
        assert out.shape == tensors[0].shape
        with births() as backward:
            grads = torch.autograd.grad(out, tensors, grad)
    for tensor, gradient in zip(tensors, grads, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
    return forward.sizes, backward.sizes, out.grad_fn.name()


def test_flash_keeps_the_output_and_the_log_sum_exp(births):
    forward, backward, name = run(births, CudaTarget(compute_capability=(8, 0)), inputs(), is_causal=True)
    assert name == "FlashKernelBackward"
    assert forward == [OUT, LSE, 16, 8]
    assert sorted(backward) == sorted([OUT] * 3 + [4 * B * H * ROUNDED, 4 * B * H * ROUNDED * D])


def test_flash_expands_the_gradients_of_grouped_keys(births):
    tensors = inputs(kv_heads=2)
    forward, backward, _ = run(births, CudaTarget(compute_capability=(8, 0)), tensors, is_causal=True, enable_gqa=True)
    assert forward == [OUT, LSE, 16, 8]
    small = OUT // 4
    assert sorted(backward) == sorted([OUT, small, small, OUT, OUT, 4 * B * H * ROUNDED, 4 * B * H * ROUNDED * D])


def test_flash_with_fixed_order_accumulates_once_a_split(births):
    target = CudaTarget(compute_capability=(8, 0), deterministic=True, multiprocessors=108)
    tensors = inputs()
    _, backward, _ = run(births, target, tensors, is_causal=True)
    splits = 7  # 108 multiprocessors over 16 rows and heads
    assert max(backward) == splits * 4 * B * H * ROUNDED * D


def test_flash_pads_head_dimensions_to_8(births):
    forward, backward, _ = run(births, CudaTarget(compute_capability=(8, 0)), inputs(dim=84), is_causal=True)
    padded = 2 * B * H * T * 88
    assert forward == [padded] * 3 + [padded, LSE, 16, 8]
    assert 4 * B * H * ROUNDED * 96 in backward


def test_the_efficient_kernel_pads_the_log_sum_exp_to_32_and_expands_the_mask(births):
    target = CudaTarget(compute_capability=(8, 0))
    mask = torch.empty(B, 1, T, T, dtype=torch.bool)
    forward, backward, name = run(births, target, inputs(), attn_mask=mask)
    assert name == "EfficientKernelBackward"
    assert forward == [2, 2, 2 * B * T * T, OUT, LSE]  # two scalars, the additive mask; T is a multiple of 32
    tiles = 3  # of 64 queries, and one of 64 head dimensions
    workspace = 4 * B * H * tiles * (64 * 64 + 4)
    assert sorted(backward) == sorted([OUT] * 3 + [LSE, workspace])


def test_the_efficient_kernel_in_fp32_computes_row_sums_in_plain_operators(births):
    forward, backward, name = run(births, CudaTarget(compute_capability=(7, 5)), inputs(torch.float32))
    assert name == "EfficientKernelBackward"
    assert forward == [2 * OUT, LSE]
    workspace = 4 * B * H * 3 * (64 * 64 + 4)
    assert sorted(backward) == sorted([2 * OUT] * 3 + [2 * OUT, LSE, LSE, workspace])


def test_cudnn_accumulates_the_gradient_of_queries_in_fp32(births):
    target = CudaTarget(compute_capability=(9, 0), torch_version=(2, 13))
    forward, backward, name = run(births, target, inputs(), is_causal=True)
    assert name == "CudnnKernelBackward"
    assert forward == [8, 8, OUT, LSE]
    assert backward == [OUT, OUT, OUT, 2 * OUT + LSE]


def test_without_gradients_the_efficient_kernel_keeps_no_log_sum_exp(births):
    with cuda_kernels(CudaTarget(compute_capability=(7, 5))), torch.no_grad(), births() as forward:
        functional.scaled_dot_product_attention(*inputs(torch.float16))
    assert forward.sizes[-2:] == [OUT, 0]


def test_math_holds_scores_in_fp32(births):
    with cuda_kernels(CudaTarget(compute_capability=(7, 5))), births() as forward:
        out = functional.scaled_dot_product_attention(*inputs(), is_causal=True)
    scores = 4 * B * H * T * T
    assert forward.sizes.count(scores) == 2  # the product, to which the mask is added in place, and the softmax
    assert out.dtype == torch.bfloat16


def test_math_computes_attention():
    """The only stand-in that computes: as PyTorch does."""
    from brim.memory.cuda.sdpa import math_attention

    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        torch.manual_seed(0)
        query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
        ours = math_attention(query, key, value, None, dropout=0.0, is_causal=True, scale=None, enable_gqa=True)
        theirs = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(ours, theirs)


def test_autocast_lowers_the_inputs():
    with cuda_kernels(CudaTarget(compute_capability=(8, 0))), torch.autocast("cpu", dtype=torch.bfloat16):
        out = functional.scaled_dot_product_attention(*inputs(torch.float32), is_causal=True)
    assert out.dtype == torch.bfloat16


def test_dropout_keeps_a_boolean_mask(births):
    with cuda_kernels(CudaTarget(compute_capability=(8, 0))):
        values = torch.empty(100, 10, requires_grad=True)
        with births() as forward:
            functional.dropout(values, 0.1)
        assert forward.sizes == [4000, 1000]
        with births() as none:
            functional.dropout(values, 0.0)
            functional.dropout(values, 0.1, training=False)
        assert sum(none.sizes) <= 4000
