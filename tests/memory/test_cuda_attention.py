"""Which attention kernel runs on CUDA, and what it allocates, against closed forms.

B=2 rows, H=8 heads, T=160 tokens, D=64.
"""

import pytest
import torch
from tests.memory.traced import Births
from torch.nn import functional

from brim.memory.cuda import CudaTarget, FlashAttnPackage
from brim.memory.cuda.attention import Tile, num_splits, split_buffers, tile_of, workspace_bytes
from brim.memory.cuda.dispatch import cuda_kernels
from brim.memory.cuda.sdpa import Attention, choose, math_attention

pytestmark = pytest.mark.usefixtures("fake")

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
AMPERE, TURING = CudaTarget(compute_capability=(8, 0)), CudaTarget(compute_capability=(7, 5))
A100 = CudaTarget(compute_capability=(8, 0), multiprocessors=108)


def call(dtype=BRAIN, heads=8, kv_heads=8, queries=64, keys=64, dim=64, value_dim=None, **changes):
    query = (2, heads, queries, dim)
    key = (2, kv_heads, keys, dim)
    return Attention(query=query, key=key, value=(*key[:3], value_dim or dim), dtype=dtype, **changes)


@pytest.mark.parametrize(
    ("why", "sm", "expected", "given"),
    [
        ("fp32 is not flash's: check_dtypes_low_precision", (8, 0), "efficient", call(FULL)),
        ("causal needs as many keys: check_flash_causal_non_square_seqlens", (8, 0), "efficient", call(keys=96, is_causal=True)),
        ("grouped queries are not the efficient kernel's before 2.14", (8, 0), "math", call(FULL, kv_heads=2, enable_gqa=True)),
        ("heads that differ without enable_gqa", (8, 0), "math", call(kv_heads=2)),
        ("head dimensions above 256: check_head_dim_size_flash", (8, 0), "efficient", call(dim=320)),
        ("values of another width: check_head_dim_size_flash", (8, 0), "efficient", call(dim=192, value_dim=128)),
        ("the efficient kernel does not: minimum_gemm_alignment", (8, 0), "math", call(dim=84, mask=(2, 1, 64, 64))),
        ("fp32 on Ampere in fours", (8, 0), "efficient", call(FULL, dim=84)),
        ("training at 224 on Ada", (8, 9), "efficient", call(dim=224, needs_gradient=True)),
        ("scoring at 224 on Ada", (8, 9), "flash", call(dim=224)),
        ("training at 256 on Ada", (8, 9), "flash", call(dim=256, needs_gradient=True)),
        ("with dropout at 256 on Ada", (8, 9), "efficient", call(dim=256, needs_gradient=True, dropout=0.1)),
        ("training at 224 on a consumer Blackwell", (12, 0), "efficient", call(dim=224, needs_gradient=True)),
        ("cuDNN first on Hopper: check_prefer_cudnn_attention", (9, 0), "cudnn", call(is_causal=True)),
        ("grouped queries with a mask, too", (9, 0), "cudnn", call(kv_heads=2, enable_gqa=True, mask=(2, 1, 64, 64))),
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
    """By the conditions of sdp_utils.cpp."""
    assert choose(given, CudaTarget(compute_capability=sm, torch_version=(2, 13))) == expected


def test_the_choice_by_release():
    # The wheels of torch 2.10 carry an older cuDNN; the efficient kernel groups queries from 2.14 on.
    grouped = call(FULL, kv_heads=2, enable_gqa=True)
    assert choose(call(), CudaTarget(compute_capability=(9, 0), torch_version=(2, 10))) == "flash"
    assert choose(grouped, CudaTarget(compute_capability=(8, 0), torch_version=(2, 14))) == "efficient"


B, H, T, D = 2, 8, 160, 64
ROUNDED = 256  # T, in blocks of 128
OUT = 2 * B * H * T * D  # bf16
LSE = 4 * B * H * T
FLASH = [4 * B * H * ROUNDED, 4 * B * H * ROUNDED * D]  # row sums and the gradient of queries, in fp32


def inputs(dtype=BRAIN, kv_heads=H, dim=D):
    """Laid out as a decoder layer's: [B, T, H, D] in memory, seen as [B, H, T, D]."""
    sizes = ((B, T, heads, dim) for heads in (H, kv_heads, kv_heads))
    return [torch.empty(*size, dtype=dtype, requires_grad=True).transpose(1, 2) for size in sizes]


def run(target, tensors, **options):
    """Sizes born in the forward and, sorted, in the backward pass, and the name of the output's gradient function."""
    with cuda_kernels(target):
        grad = torch.empty(B, T, H, tensors[0].shape[-1], dtype=tensors[0].dtype).transpose(1, 2)
        with Births() as forward:
            out = functional.scaled_dot_product_attention(*tensors, **options)
        assert out.shape == tensors[0].shape
        with Births() as backward:
            grads = torch.autograd.grad(out, tensors, grad)
    for tensor, gradient in zip(tensors, grads, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
    return forward.sizes, sorted(backward.sizes), out.grad_fn.name()


def test_flash_keeps_the_output_and_the_log_sum_exp():
    forward, backward, name = run(AMPERE, inputs(), is_causal=True)
    assert (forward, name) == ([OUT, LSE, 16, 8], "FlashKernelBackward")
    assert backward == sorted([OUT] * 3 + FLASH)
    # It expands the gradients of grouped keys.
    forward, backward, _ = run(AMPERE, inputs(kv_heads=2), is_causal=True, enable_gqa=True)
    assert forward == [OUT, LSE, 16, 8]
    assert backward == sorted([OUT, OUT // 4, OUT // 4, OUT, OUT, *FLASH])
    # It pads head dimensions to 8.
    forward, backward, _ = run(AMPERE, inputs(dim=84), is_causal=True)
    padded = 2 * B * H * T * 88
    assert forward == [padded] * 3 + [padded, LSE, 16, 8]
    assert 4 * B * H * ROUNDED * 96 in backward


def test_the_efficient_kernel_pads_the_log_sum_exp_to_32_and_expands_the_mask():
    forward, backward, name = run(AMPERE, inputs(), attn_mask=torch.empty(B, 1, T, T, dtype=torch.bool))
    assert name == "EfficientKernelBackward"
    assert forward == [2, 2, 2 * B * T * T, OUT, LSE]  # two scalars, the additive mask; T is a multiple of 32
    workspace = 4 * B * H * 3 * (64 * 64 + 4)  # 3 tiles of 64 queries, and one of 64 head dimensions
    assert backward == sorted([OUT] * 3 + [LSE, workspace])
    # In fp32 it computes row sums in plain operators.
    forward, backward, name = run(TURING, inputs(FULL))
    assert (forward, name) == ([2 * OUT, LSE], "EfficientKernelBackward")
    assert backward == sorted([2 * OUT] * 3 + [2 * OUT, LSE, LSE, workspace])
    # Without gradients it keeps no log-sum-exp.
    with cuda_kernels(TURING), torch.no_grad(), Births() as forward:
        functional.scaled_dot_product_attention(*inputs(HALF))
    assert forward.sizes[-2:] == [OUT, 0]


def test_cudnn_accumulates_the_gradient_of_queries_in_fp32():
    target = CudaTarget(compute_capability=(9, 0), torch_version=(2, 13))
    forward, backward, name = run(target, inputs(), is_causal=True)
    assert (forward, name) == ([8, 8, OUT, LSE], "CudnnKernelBackward")
    assert backward == [OUT, OUT, OUT, 2 * OUT + LSE]


def test_math_holds_scores_in_fp32_and_computes_attention_as_pytorch_does():
    with cuda_kernels(TURING), Births() as forward:
        out = functional.scaled_dot_product_attention(*inputs(), is_causal=True)
    scores = 4 * B * H * T * T
    assert forward.sizes.count(scores) == 2  # the product, to which the mask is added in place, and the softmax
    assert out.dtype == BRAIN
    with torch._subclasses.fake_tensor.unset_fake_temporarily():  # the only stand-in that computes
        torch.manual_seed(0)
        query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
        ours = math_attention(query, key, value, None, dropout=0.0, is_causal=True, scale=None, enable_gqa=True)
        theirs = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(ours, theirs)


def test_autocast_lowers_the_inputs():
    with cuda_kernels(AMPERE), torch.autocast("cpu", dtype=BRAIN):
        out = functional.scaled_dot_product_attention(*inputs(FULL), is_causal=True)
    assert out.dtype == BRAIN


def test_dropout_keeps_a_boolean_mask():
    with cuda_kernels(AMPERE):
        values = torch.empty(100, 10, requires_grad=True)
        with Births() as forward:
            functional.dropout(values, 0.1)
        assert forward.sizes == [4000, 1000]
        with Births() as none:
            functional.dropout(values, 0.0)
            functional.dropout(values, 0.1, training=False)
        assert sum(none.sizes) <= 4000


def test_the_kernel_that_takes_the_head_dimension():
    for head_dim, half, sm, (queries, keys, widest) in (
        (32, True, (8, 0), (64, 64, 32)),
        (96, True, (8, 9), (128, 64, 96)),
        (96, True, (8, 0), (128, 128, 128)),
        (128, True, (8, 0), (128, 128, 128)),
        (128, True, (8, 9), (64, 64, 128)),
        (128, True, (7, 5), (128, 64, 128)),
        (128, False, (7, 5), (64, 64, 128)),
    ):
        found = tile_of(head_dim, half=half, dropout=False, target=CudaTarget(compute_capability=sm))
        assert found == Tile(queries=queries, keys=keys, widest=widest), (head_dim, half, sm)


def size(dim, dtype=BRAIN):
    dims = {"head_dim": dim, "value_dim": dim, "dtype": dtype, "dropout": False, "target": AMPERE}
    return workspace_bytes(rows=2, heads=8, queries=512, keys=512, **dims)


def test_gradients_are_accumulated_in_fp32_tiles():
    # Wide heads accumulate the gradients of keys and values for each split.
    tiles = 4 * 4 * (128 * 64 + 4)  # 4 blocks of 128 queries, 4 of 64 of the 256 dimensions
    splits = 8  # 512 keys by 64; up to 200 over 16 rows and heads
    assert size(256) == 4 * 2 * 8 * (tiles + splits * 64 * (256 + 256))
    assert size(128, FULL) == 4 * 2 * 8 * (4 * 2) * (128 * 64 + 4)  # fp32 gradients are their own accumulators


def test_the_fewest_splits_that_use_the_device_nearly_best():
    assert num_splits(173, 216, 64) == 1  # four fifths of 216 slots are busy
    assert num_splits(32, 216, 1) == 1  # nothing to split
    assert num_splits(32, 216, 32) == 6  # 192 of 216 slots; one more would need a second wave
    assert num_splits(1, 216, 300) == 100  # at most 128, and as few as do 85% of the best


def test_one_token_of_32_heads_over_4096_keys_is_split_but_with_dropout_and_on_unknown_devices():
    like = torch.empty(1, 1, 32, 128, dtype=BRAIN)
    log_sum_exps, outputs = split_buffers(1, 32, 1, 4096, 128, dropout=0.0, like=like, target=A100)
    assert log_sum_exps.shape == (6, 1, 32, 1)
    assert (outputs.shape, outputs.dtype) == ((6, 1, 32, 1, 128), FULL)
    assert split_buffers(1, 32, 1, 4096, 128, dropout=0.1, like=like, target=A100) == ()
    assert split_buffers(1, 32, 1, 4096, 128, dropout=0.0, like=like, target=AMPERE) == ()


N = B * T


def package_run(run, *shape, kv_heads=H, dim=D):
    sizes = ((*shape, heads, dim) for heads in (H, kv_heads, kv_heads))
    tensors = [torch.empty(each, dtype=BRAIN, requires_grad=True) for each in sizes]
    with Births() as forward:
        out = run(*tensors)
    grad = torch.empty(out.shape, dtype=out.dtype)
    with Births() as backward:
        grads = torch.autograd.grad(out, tensors, grad)
    assert [each.shape for each in grads] == [each.shape for each in tensors]
    assert out.shape == tensors[0].shape
    return forward.sizes, sorted(backward.sizes)


def test_the_package_on_rows_of_one_length():
    package = FlashAttnPackage(target=AMPERE).flash_attn_func
    for kv_heads, expanded in ((8, []), (2, [OUT, OUT])):
        forward, backward = package_run(package, B, T, kv_heads=kv_heads)
        small = OUT * kv_heads // H
        assert forward == [OUT, LSE, 16]
        assert backward == sorted([OUT, small, small, *expanded, *FLASH])
    # Head dimensions are padded to 8 and cut again.
    forward, backward = package_run(package, B, T, dim=84)
    padded = 2 * N * H * 88
    assert forward == [padded] * 4 + [LSE, 16]
    assert backward == sorted([padded] * 4 + [4 * B * H * 256, 4 * B * H * 256 * 96])


def test_the_package_on_rows_of_different_lengths():
    lengths, package = torch.empty(B + 1, dtype=torch.int32), FlashAttnPackage(target=AMPERE)
    forward, backward = package_run(lambda *qkv: package.flash_attn_varlen_func(*qkv, lengths, lengths, 200, 200), N)
    assert forward == [OUT, 4 * H * N, 16]
    row_sums = 4 * H * (N + 128 * B)
    assert backward == sorted([OUT] * 3 + [row_sums, row_sums * D])
