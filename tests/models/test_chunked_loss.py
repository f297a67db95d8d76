"""The loss in chunks against the loss of whole logits: values, gradients, precisions, and what is never made."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from brim.models import chunk_rows
from brim.models.chunked_loss import LogitTransform, chunked_loss_sum, chunked_scores

S, D, V = 23, 8, 50
TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(cap=5.0), LogitTransform(scale=3.0, cap=2.0)]


def inputs(dtype=torch.float32, *, bias=False, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, D, generator=generator, dtype=torch.float64) * size for rows in (S, V))
    offset = torch.randn(V, generator=generator, dtype=torch.float64) if bias else None
    tensors = [None if each is None else each.to(dtype).requires_grad_() for each in (hidden, weight, offset)]
    return *tensors, torch.randint(V, (S,), generator=generator)


def whole(hidden, weight, bias, targets, transform):
    logits = linear(hidden, weight, bias)
    logits = logits * transform.scale
    if transform.cap is not None:
        logits = torch.tanh(logits / transform.cap) * transform.cap
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide, targets, reduction="sum")


def gradients(loss, tensors):
    return torch.autograd.grad(loss * 3, [each for each in tensors if each is not None])


def error(one, other):
    """Of several tensors as one, in the norm."""
    one, other = (torch.cat([each.flatten().double() for each in tensors]) for tensors in (one, other))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("most_rows", [1, 4, 22, 23, 100])
def test_loss_and_gradients_are_those_of_whole_logits_in_fp64(transform, bias, most_rows):
    *tensors, targets = inputs(torch.float64, bias=bias)
    expected = whole(*tensors, targets, transform)
    loss = chunked_loss_sum(*tensors, targets, transform=transform, most_rows=most_rows)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    assert error(gradients(loss, tensors), gradients(expected, tensors)) < 1e-14


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_are_finite_differences(transform):
    *tensors, targets = inputs(torch.float64, bias=True)
    (direction,) = gradients(chunked_loss_sum(*tensors, targets, transform=transform, most_rows=5), tensors[1:2])

    def loss(step):
        weight = (tensors[1] + step * direction).detach()
        return float(chunked_loss_sum(tensors[0].detach(), weight, tensors[2].detach(), targets, transform=transform))

    step = 1e-6
    slope = (loss(step) - loss(-step)) / (2 * step)
    assert slope == pytest.approx(float((direction / 3 * direction).sum()), rel=1e-6)


def test_in_fp32_it_is_pytorchs_own():
    own = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if own is None:
        pytest.skip("of torch 2.13 and later")
    hidden, weight, bias, targets = inputs()
    loss = chunked_loss_sum(hidden, weight, bias, targets, most_rows=5)
    expected = own(hidden, weight, targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert error(gradients(loss, [hidden, weight]), gradients(expected, [hidden, weight])) < 1e-6


def test_chunks_do_not_matter_in_fp32():
    *tensors, targets = inputs()
    one, *others = (chunked_loss_sum(*tensors, targets, most_rows=rows) for rows in (S, 1, 6, 7))
    reference = gradients(one, tensors)
    for each in others:
        torch.testing.assert_close(each, one, rtol=1e-6, atol=0)
        assert error(gradients(each, tensors), reference) < 1e-6


def test_the_same_again_is_equal_to_the_bit():
    *tensors, targets = inputs(torch.bfloat16)
    first, second = (gradients(chunked_loss_sum(*tensors, targets, most_rows=4), tensors) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["bf16-true", "bf16-mixed"])
def test_in_bf16_it_is_as_near_to_the_truth_as_whole_logits(transform, weights):
    *tensors, targets = inputs(weights, bias=True)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    truth = gradients(whole(*exact, targets, transform), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=weights == torch.float32):
        loss = chunked_loss_sum(*tensors, targets, transform=transform, most_rows=4)
        same = whole(*tensors, targets, transform)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, same, rtol=1e-2, atol=0)
    ours, theirs = (error(gradients(each, tensors), truth) for each in (loss, same))
    assert ours < 1e-2
    assert ours < 1.5 * theirs


def test_hits_and_losses_of_each_position():
    *tensors, targets = inputs()
    logits = linear(tensors[0], tensors[1])
    scores = chunked_scores(*tensors, targets, most_rows=4)
    torch.testing.assert_close(scores.loss, cross_entropy(logits, targets, reduction="none"))
    assert torch.equal(scores.is_correct, logits.argmax(dim=-1) == targets)
    assert not scores.loss.requires_grad


def test_without_gradients_the_sum_is_the_same():
    *tensors, targets = inputs()
    with torch.no_grad():
        loss = chunked_loss_sum(*tensors, targets, most_rows=4)
    assert torch.equal(loss, chunked_loss_sum(*tensors, targets, most_rows=4).detach())


def test_nothing_to_learn_is_zero():
    hidden, weight, bias, targets = inputs()
    loss = chunked_loss_sum(hidden[:0], weight, bias, targets[:0])
    assert loss.item() == 0
    assert not any(each.any() for each in gradients(loss, [hidden, weight]))


class _Births(TorchDispatchMode):
    """Every tensor that an operator makes, and every operator."""

    def __init__(self):
        super().__init__()
        self.shapes, self.operators = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators.add(func.name())
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.shapes.append(tuple(each.shape))
        return result


@pytest.mark.parametrize("trained", [True, False])
def test_logits_never_stand_whole_and_nothing_is_made_that_nobody_needs(trained):
    hidden, weight, _, targets = inputs()
    weight.requires_grad_(trained)
    with _Births() as births:
        chunked_loss_sum(hidden, weight, None, targets, most_rows=4).backward()
    assert (4, V) in births.shapes
    assert (S, V) not in births.shapes
    assert ((V, D) in births.shapes) == trained
    assert not any("local_scalar" in name or "nonzero" in name or "is_nonzero" in name for name in births.operators)
    assert all(name.startswith("aten::") for name in births.operators)


def test_a_weights_gradient_in_16_bits_is_summed_in_32():
    """300 chunks that each add 1/300 of the gradient: a sum in bf16 would stop growing half-way."""
    rows = 300
    hidden = torch.ones(rows, D, dtype=torch.bfloat16)
    weight = torch.zeros(V, D, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    chunked_loss_sum(hidden, weight, None, targets, most_rows=1).backward()
    expected = torch.full((V, D), rows / V)
    expected[0] -= rows
    assert error([weight.grad], [expected]) < 4e-3  # bf16 has 8 bits


def gradient_of_the_unlikely(loss_of, scale):
    """Positions between two likely tokens; all others have a probability of 1e-9, which is 0 in fp16."""
    hidden = torch.eye(D)
    weight = torch.zeros(V, D)
    weight[:D] = weight[D : 2 * D] = 20 * torch.eye(D)
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(hidden, weight, None, torch.arange(D)) / D
    (gradient,) = torch.autograd.grad(loss * scale, weight)
    return [gradient[2 * D :]]


def test_in_fp16_small_gradients_live_by_the_loss_scale():
    scale = torch.tensor(65536.0)
    expected = gradient_of_the_unlikely(lambda *args: whole(*args, LogitTransform()), scale)
    scaled = gradient_of_the_unlikely(
        lambda *args: chunked_loss_sum(*args, gradient_scale=scale / D, most_rows=3), scale
    )
    assert bool(expected[0].all())
    assert error(scaled, expected) < 1e-2
    unscaled = gradient_of_the_unlikely(lambda *args: chunked_loss_sum(*args, most_rows=3), scale)
    assert not unscaled[0].any()


def test_in_fp16_a_loss_scale_that_is_too_large_shows():
    scale = torch.tensor(2.0**40)
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked_loss_sum(hidden, weight, None, targets, gradient_scale=scale, most_rows=4)
    assert not all(bool(each.isfinite().all()) for each in torch.autograd.grad(loss * scale, [hidden, weight]))


@pytest.mark.parametrize(
    ("vocabulary_size", "frozen", "trained"),
    [(32_000, 1048, 4192), (128_256, 261, 1044), (256_000, 256, 1024), (300, 111_848, 447_392)],
)
def test_rows_of_a_chunk(vocabulary_size, frozen, trained):
    assert chunk_rows(vocabulary_size, head_trains=False) == frozen
    assert chunk_rows(vocabulary_size, head_trains=True) == trained
