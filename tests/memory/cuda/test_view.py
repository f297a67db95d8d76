import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from brim.memory.cuda import CudaTarget
from brim.memory.cuda.dispatch import cuda_kernels

pytestmark = pytest.mark.usefixtures("fake")

TARGET = CudaTarget(compute_capability=(8, 0))


def test_rms_norm_keeps_one_number_a_row(births):
    values = torch.empty(4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    norm = nn.RMSNorm(64, dtype=torch.bfloat16)
    with cuda_kernels(TARGET):
        with births() as forward:
            out = norm(values)
        assert forward.sizes == [2 * 4 * 16 * 64, 4 * 4 * 16]
        out.sum().backward()
    assert (values.grad.shape, values.grad.dtype) == (values.shape, torch.bfloat16)
    assert norm.weight.grad.shape == (64,)


def test_rms_norm_with_a_weight_of_another_dtype_is_plain_operators(births):
    values = torch.empty(4, 64, dtype=torch.bfloat16)
    with cuda_kernels(TARGET), births() as forward, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype")  # PyTorch says it once a process
        functional.rms_norm(values, (64,), torch.empty(64))
    assert len(forward.sizes) > 2


def test_a_grouped_product_starts_rows_at_multiples_of_16_bytes(births):
    tokens, experts = torch.empty(24, 64, requires_grad=True), torch.empty(4, 64, 30, requires_grad=True)
    with cuda_kernels(TARGET):
        with births() as forward:
            out = functional.grouped_mm(tokens, experts, offs=torch.empty(4, dtype=torch.int32))
        assert (out.shape, forward.sizes[-1]) == ((24, 30), 4 * (23 * 32 + 30))
        out.sum().backward()
    assert (tokens.grad.shape, experts.grad.shape) == (tokens.shape, experts.shape)


def test_an_fp16_softmax_in_fp32_copies_nothing(births):
    with cuda_kernels(TARGET):
        for dtype, sizes in ((torch.float16, [4096]), (torch.bfloat16, [4096, 4096])):
            scores = torch.empty(32, 32, dtype=dtype, requires_grad=True)
            with births() as forward:
                out = functional.softmax(scores, dim=-1, dtype=torch.float32)
            assert forward.sizes == sizes
            out.sum().backward()
            assert scores.grad.dtype == dtype


def test_the_functions_are_put_back():
    before = (functional.dropout, functional.softmax, functional.rms_norm, torch.dropout)
    with cuda_kernels(TARGET):
        assert functional.dropout is not before[0]
    assert (functional.dropout, functional.softmax, functional.rms_norm, torch.dropout) == before
