"""CPU autocast with CUDA's lists, on real tensors: dtypes, values and what is cast once."""

import pytest
import torch
from torch.nn import functional

from brim.memory.cuda.autocast import FP32, FP32_RESULT, LOWER, PROMOTE, autocast_as_on_cuda

LOW = torch.bfloat16


@pytest.fixture
def autocast():
    with autocast_as_on_cuda(), torch.autocast("cpu", dtype=LOW):
        yield


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.rand(4, 8, dtype=LOW) + 0.5


@pytest.mark.usefixtures("autocast")
def test_what_loses_precision_runs_in_fp32(x):
    weight = torch.ones(8, dtype=LOW)
    results = [
        torch.exp(x), x.log(), x.pow(3), x**2, 2.0**x, torch.rsqrt(x), x.reciprocal(), functional.softplus(x),
        functional.layer_norm(x, (8,), weight, weight), functional.rms_norm(x, (8,)), x.logsumexp(-1),
        functional.softmax(x, -1), x.log_softmax(-1), x.sum(), x.sum(-1), x.prod(), x.cumsum(0),
        torch.linalg.vector_norm(x),
    ]  # fmt: skip
    assert {each.dtype for each in results} == {torch.float32}


@pytest.mark.usefixtures("autocast")
def test_values_are_those_of_fp32(x):
    torch.testing.assert_close(torch.exp(x), x.float().exp())
    torch.testing.assert_close(functional.softmax(x, -1), functional.softmax(x.float(), -1))


@pytest.mark.usefixtures("autocast")
def test_a_dtype_that_the_caller_names_is_kept(x):
    assert x.sum(-1, dtype=LOW).dtype == LOW
    assert torch.arange(4).cumsum(0).dtype == torch.int64


@pytest.mark.usefixtures("autocast")
def test_products_are_lowered_and_the_rest_is_left_alone(x):
    wide = x.float()
    assert functional.linear(wide, torch.ones(8, 8)).dtype == LOW
    assert torch.einsum("ab,cb->ac", wide, wide).dtype == LOW
    assert torch.mv(wide, torch.ones(8)).dtype == LOW
    assert functional.gelu(x).dtype == LOW
    assert torch.cat([x, wide]).dtype == torch.float32
    assert torch.addcmul(wide, x, x).dtype == torch.float32


def test_cross_entropy_is_cast_in_its_parts(x):
    labels = torch.arange(4)
    narrow = torch.log_softmax(x, -1, dtype=LOW)
    with autocast_as_on_cuda(), torch.autocast("cpu", dtype=LOW):
        loss = functional.cross_entropy(x, labels)
    assert torch.equal(loss, functional.nll_loss(narrow.float(), labels))


@pytest.mark.usefixtures("fake", "autocast")
def test_only_weights_that_train_are_lowered_once(births):
    trained, frozen = torch.empty(8, 8, requires_grad=True), torch.empty(8, 8)
    inputs = torch.empty(4, 8, dtype=LOW)
    for weight, copies in ((trained, 1), (frozen, 2)):
        with births() as seen:
            functional.linear(inputs, weight)
            functional.linear(inputs, weight)
        assert seen.sizes.count(2 * 8 * 8) == copies


def test_outside_the_cpu_casts_as_before(x):
    with autocast_as_on_cuda():
        pass
    with torch.autocast("cpu", dtype=LOW):
        assert torch.exp(x).dtype == LOW
        assert torch.cat([x, x.float()]).dtype == torch.float32


def test_no_operator_stands_in_two_lists():
    every = [*FP32, *FP32_RESULT, *PROMOTE, *LOWER]
    assert len(every) == len(set(every))
