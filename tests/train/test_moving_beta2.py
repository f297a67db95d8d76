"""Adam's second beta over a batch that moves, against an Adam in plain numpy."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.properties import examples
from torch import nn

from brim.batching import doubling, stretches
from brim.config import load_config
from brim.train import build_optimizer
from brim.train.checkpoint import optimizer_state, restore_optimizer
from brim.train.optimizer import MovingBeta2, set_learning_rate

FINAL = 16
RAMP = doubling(initial=4, final=FINAL, length_samples=96)  # 12 updates of 4 rows, 6 of 8, then 16
SIZES = [each.size for each in stretches(RAMP, num_rows=10_000, total_samples=256) for _ in range(each.num_steps)]
UP_AND_DOWN = [16, 16, 4, 4, 64, 1, 16, 8, 32, 16]
NAMES = [f"{page}{name}{bits}" for page in ("", "paged_") for name in ("adam", "adamw") for bits in ("", "_8bit")]
NEVER = 10**9  # elements from which on a state would have 8 bits


def settings(optimizer):
    source = {"base_model": "m", "adapter": "lora", "trainer": {"type": "finetune", "optimizer": optimizer}}
    return load_config(source).config.trainer.optimizer


def weights(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((5, 3), (7,))]


def gradients(parameters, update):
    """Of very different sizes, and of other ones later, so that both averages matter."""
    generator = torch.Generator().manual_seed(1000 + update)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        spread = torch.logspace(-3, 1, parameter.numel(), dtype=parameter.dtype).reshape(parameter.shape)
        yield noise * spread / (1 + update / 10)


def learning_rate(update):
    return 0.01 * (1 + math.sin(update))


def train(parameters, optimizer, rates, sizes, *, first=0):
    for update, size in enumerate(sizes, start=first):
        for parameter, gradient in zip(parameters, gradients(parameters, update), strict=True):
            parameter.grad = gradient
        rates.set(size=size, learning_rate=learning_rate(update))
        optimizer.step()
        rates.stepped()


def adam(parameters, asked, sizes, *, product=True):
    """Kingma and Ba 2015, algorithm 1, with a beta2 for each update, in float64; each weight's values in the end.

    product: divide by 1 minus the product of the betas used; else, as torch does, by 1 minus a power of the present.
    """
    (beta1, beta2), eps, decay = asked["betas"], asked.get("eps", 1e-8), asked.get("weight_decay", 0.0)
    by_weight = []
    for number, parameter in enumerate(parameters):
        weight = parameter.detach().double().numpy().copy()
        mean, square, largest = np.zeros_like(weight), np.zeros_like(weight), np.zeros_like(weight)
        first_product, second_product = 1.0, 1.0
        for update, size in enumerate(sizes):
            rate, present = learning_rate(update), beta2 ** (size / FINAL)
            gradient = list(gradients(parameters, update))[number].double().numpy()
            if asked["type"] == "adam":
                gradient = gradient + decay * weight
            else:
                weight = weight - rate * decay * weight
            mean = beta1 * mean + (1 - beta1) * gradient
            square = present * square + (1 - present) * gradient**2
            largest = np.maximum(largest, square)
            first_product *= beta1
            second_product = second_product * present if product else present ** (update + 1)
            corrected = (largest if asked.get("amsgrad") else square) / (1 - second_product)
            weight = weight - rate * mean / (1 - first_product) / (np.sqrt(corrected) + eps)
        by_weight.append(weight)
    return by_weight


ASKED = [
    {"type": "adam", "betas": [0.9, 0.999]},
    {"type": "adam", "betas": [0.9, 0.99], "weight_decay": 0.3, "eps": 0.1},
    {"type": "adam", "betas": [0.8, 0.95], "weight_decay": 0.1, "amsgrad": True},
    {"type": "adamw", "betas": [0.9, 0.999]},
    {"type": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.3, "eps": 0.1},
    {"type": "adamw", "betas": [0.9, 0.999], "weight_decay": 0.1, "eps": 0.0, "amsgrad": True},
    {"type": "adamw", "betas": [0.0, 0.0], "weight_decay": 0.1, "eps": 1e-3},
]


@pytest.mark.parametrize("sizes", [SIZES, UP_AND_DOWN], ids=["ramp", "up and down"])
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: " ".join(map(str, asked.values())))
def test_over_a_ramp_it_is_adam_with_the_product_of_the_betas_used(asked, sizes):
    parameters = weights()
    expected = adam(parameters, asked, sizes)
    chosen = settings(asked)
    optimizer = build_optimizer(chosen, parameters)
    train(parameters, optimizer, MovingBeta2(chosen, optimizer, final_size=FINAL), sizes)
    for actual, oracle in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), oracle, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("path", ["foreach", "fused"])  # the first is torch's choice on a GPU
def test_torch_s_other_ways_to_update_read_the_same_rates(path):
    asked = {"type": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.3, "eps": 0.1}
    parameters = weights()
    expected = adam(parameters, asked, UP_AND_DOWN)
    optimizer = torch.optim.AdamW(parameters, lr=0.0, **{path: True})
    train(parameters, optimizer, MovingBeta2(settings(asked), optimizer, final_size=FINAL), UP_AND_DOWN)
    for actual, oracle in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), oracle, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["adam_8bit", "adamw_8bit", "paged_adam", "paged_adamw"])
def test_bitsandbytes_adams_follow_it_with_32_bit_states(name):
    asked = {"type": name, "betas": [0.9, 0.99], "weight_decay": 0.3, "eps": 0.1}
    chosen = settings(asked if "paged" in name else {**asked, "min_8bit_size": NEVER})
    parameters = weights(torch.float32)
    expected = adam(parameters, asked, SIZES)
    optimizer = build_optimizer(chosen, parameters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        train(parameters, optimizer, MovingBeta2(chosen, optimizer, final_size=FINAL), SIZES)
    for actual, oracle in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), oracle, rtol=1e-5, atol=1e-6)


def error_of_8_bits(size):
    """√v as 8-bit states have it, relative to float64, after 300 updates of gradients of very different sizes.

    The 10th, 50th and 90th percentile over 1,024 elements.
    """
    import bitsandbytes.functional as bnb

    chosen = settings({"type": "adamw_8bit", "min_8bit_size": 1})
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(1024))
    spread = torch.exp(1.5 * torch.randn(1024, generator=generator))
    optimizer = build_optimizer(chosen, [weight])
    rates = MovingBeta2(chosen, optimizer, final_size=64)
    square = torch.zeros(1024, dtype=torch.float64)
    for _ in range(300):
        weight.grad = torch.randn(1024, generator=generator) * spread
        rates.set(size=size, learning_rate=0.01)
        optimizer.step()
        rates.stepped()
        beta2 = 0.999 ** (size / 64)
        square = beta2 * square + (1 - beta2) * weight.grad.double() ** 2
    state = optimizer.state[weight]
    kept = bnb.dequantize_blockwise(state["state2"], absmax=state["absmax2"], code=state["qmap2"], blocksize=256)
    return torch.quantile((kept.double() / square).sqrt(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).numpy()


def test_slower_forgetting_costs_8_bit_states_no_precision():
    np.testing.assert_allclose(error_of_8_bits(1), error_of_8_bits(64), rtol=0.03)


def test_the_correction_of_torch_would_nearly_double_the_first_update_after_a_switch():
    """12 updates at a quarter of the final batch, and one at all of it: 13 betas are counted, of 4 that were used."""
    sizes = [4] * 12 + [16]
    asked = {"type": "adam", "betas": [0.9, 0.999], "eps": 0.0}
    parameters = weights()
    before, torch_s, right = (
        adam(parameters, asked, sizes[:12]),
        adam(parameters, asked, sizes, product=False),
        adam(parameters, asked, sizes),
    )
    too_large = math.sqrt((1 - 0.999**13) / (1 - 0.999**4))
    assert too_large == pytest.approx(1.799, abs=5e-4)
    for start, theirs, ours in zip(before, torch_s, right, strict=True):
        np.testing.assert_allclose(theirs - start, too_large * (ours - start), rtol=1e-9)
    # And torch's Adam does so.
    chosen = settings(asked)
    optimizer = build_optimizer(chosen, parameters)
    rates = MovingBeta2(chosen, optimizer, final_size=FINAL)
    train(parameters, optimizer, rates, sizes[:12])
    for parameter, gradient in zip(parameters, gradients(parameters, 12), strict=True):
        parameter.grad = gradient
    optimizer.param_groups[0].update(betas=(0.9, 0.999), lr=learning_rate(12), eps=0.0)
    optimizer.step()
    for actual, theirs in zip(parameters, torch_s, strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_at_the_final_size_it_is_the_plain_optimizer_to_the_bit(name):
    chosen = settings({"type": name, "weight_decay": 0.1})
    moving, plain = weights(torch.float32), weights(torch.float32)
    optimizers = build_optimizer(chosen, moving), build_optimizer(chosen, plain)
    rates = MovingBeta2(chosen, optimizers[0], final_size=FINAL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        train(moving, optimizers[0], rates, [FINAL] * 20)
        for update in range(20):
            for parameter, gradient in zip(plain, gradients(plain, update), strict=True):
                parameter.grad = gradient
            set_learning_rate(optimizers[1], learning_rate(update))
            optimizers[1].step()
    for key in ("lr", "eps", "weight_decay"):
        assert optimizers[0].param_groups[0][key] == optimizers[1].param_groups[0][key]
    assert tuple(optimizers[0].param_groups[0]["betas"]) == tuple(optimizers[1].param_groups[0]["betas"])
    for ours, theirs in zip(moving, plain, strict=True):
        assert torch.equal(ours, theirs)


@given(num_updates=st.integers(1, 10_000), beta2=st.floats(0.0, 0.9999))
@examples(50)
def test_after_any_number_of_updates_at_the_final_size_nothing_is_corrected(num_updates, beta2):
    chosen = settings({"type": "adamw", "betas": [0.9, beta2], "weight_decay": 0.1})
    optimizer = build_optimizer(chosen, weights())
    rates = MovingBeta2(chosen, optimizer, final_size=3)
    rates.restore({"num_updates": num_updates, "exponents": float(num_updates)})
    rates.set(size=3, learning_rate=0.1)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["weight_decay"]) == (0.1, 1e-8, 0.1)
    assert group["betas"] == (0.9, beta2)


@given(size=st.integers(1, 4096), steps=st.integers(1, 1000))
@examples(50)
def test_a_phase_forgets_as_much_a_sample_as_the_final_one(size, steps):
    chosen = settings({"type": "adamw", "betas": [0.9, 0.999]})
    optimizer = build_optimizer(chosen, weights())
    rates = MovingBeta2(chosen, optimizer, final_size=256)
    rates.set(size=size, learning_rate=0.1)
    kept = optimizer.param_groups[0]["betas"][1] ** steps
    assert kept == pytest.approx(0.999 ** (size * steps / 256), rel=1e-9)


@pytest.mark.parametrize("asked", [ASKED[1], ASKED[4], {"type": "adamw_8bit", "weight_decay": 0.1, "min_8bit_size": 8}])
@pytest.mark.parametrize("at", [5, 12, 18])  # within a phase, and at both switches
def test_it_goes_on_from_its_state_to_the_bit(asked, at):
    chosen = settings(asked)
    whole, part = weights(torch.float32), weights(torch.float32)
    optimizer = build_optimizer(chosen, whole)
    train(whole, optimizer, MovingBeta2(chosen, optimizer, final_size=FINAL), SIZES)

    before = build_optimizer(chosen, part)
    rates = MovingBeta2(chosen, before, final_size=FINAL)
    train(part, before, rates, SIZES[:at])
    saved = json.loads(json.dumps(rates.state()))
    tensors, numbers = optimizer_state(before)
    after = build_optimizer(chosen, part)
    restore_optimizer(after, tensors, numbers)
    resumed = MovingBeta2(chosen, after, final_size=FINAL)
    resumed.restore(saved)
    assert resumed.state() == rates.state()
    train(part, after, resumed, SIZES[at:], first=at)
    for ours, theirs in zip(part, whole, strict=True):
        assert torch.equal(ours, theirs)


def test_an_update_that_was_left_out_is_not_counted():
    chosen = settings({"type": "adamw"})
    optimizer = build_optimizer(chosen, weights())
    rates = MovingBeta2(chosen, optimizer, final_size=FINAL)
    rates.set(size=4, learning_rate=0.1)
    rates.set(size=4, learning_rate=0.1)
    rates.stepped()
    assert rates.state() == {"num_updates": 1, "exponents": 0.25}


def test_a_weight_that_first_learns_after_a_switch_gets_the_correction_of_the_others():
    """Its first update is by k too small: 1.8 times in the case above. Later ones come near, as both go to 1."""
    chosen = settings({"type": "adam", "betas": [0.9, 0.999], "eps": 0.0})
    always, late = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = build_optimizer(chosen, [always, late])
    rates = MovingBeta2(chosen, optimizer, final_size=FINAL)
    for size in [4] * 12:
        always.grad = torch.ones_like(always)
        rates.set(size=size, learning_rate=0.1)
        optimizer.step()
        rates.stepped()
    late.grad = torch.ones_like(late)
    rates.set(size=16, learning_rate=0.1)
    optimizer.step()
    assert late.item() == pytest.approx(-0.1 / math.sqrt((1 - 0.999**13) / (1 - 0.999**4)))
