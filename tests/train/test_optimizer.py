"""Learning rates over consumed samples, betas over a batch that moves, and optimizers: each against its oracle."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, strategies as st
from tests.properties import examples
from tests.train.scarce import small_net, train_net
from torch import nn

from brim.batching import BatchSchedule
from brim.config import DeviceFacts, load_config, resolve
from brim.errors import ConfigError
from brim.train import LearningRate, build_optimizer
from brim.train.checkpoints import optimizer_state, restore_optimizer
from brim.train.optimizer import FixedBetas, MovingBeta2, require_room, update_rates


def rates(schedule, batch, total):
    return [schedule(consumed_samples=c, batch_samples=batch) for c in range(0, total, batch)]


def test_learning_rates_by_hand():
    assert rates(LearningRate(peak=0.5, total_samples=8), 2, 8) == [0.5] * 4
    # The first step of a warm-up learns, and its last one is at the peak.
    warm = LearningRate(peak=1.0, warmup_samples=8, total_samples=16)
    assert rates(warm, 2, 16) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    # A BatchSchedule.linear decay starts at the peak and would reach the floor after the last step.
    line = LearningRate(peak=1.0, floor=0.2, decay="linear", total_samples=8)
    assert rates(line, 2, 8) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert line(consumed_samples=8, batch_samples=2) == 0.2
    cosine = LearningRate(peak=1.0, decay="cosine", warmup_samples=4, total_samples=12)
    assert rates(cosine, 4, 12) == pytest.approx([1.0, 1.0, 0.5])
    assert cosine(consumed_samples=10, batch_samples=1) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.75)))
    wsd = LearningRate(peak=1.0, decay="wsd", warmup_samples=2, decay_samples=4, total_samples=12)
    assert rates(wsd, 1, 12) == pytest.approx([0.5] + [1.0] * 8 + [0.75, 0.5, 0.25])
    # The clock is samples, so the batch does not bend the decay.
    assert cosine(consumed_samples=9, batch_samples=8) == cosine(consumed_samples=9, batch_samples=1)


# NVIDIA-NeMo/Megatron-Bridge issue 2609: 100 iterations of 16 rows, warm-up 10, WSD over the last 20, and a ramp from 8
# rows to 16 over 160 samples. Counted in iterations, the warm-up took 20 of them, and the decay stopped half way.
BATCH = 16
REPORTED = LearningRate(
    peak=3e-4, floor=3e-5, decay="wsd", warmup_samples=10 * BATCH, decay_samples=20 * BATCH, total_samples=100 * BATCH
)


def test_a_ramp_bends_neither_the_warm_up_nor_the_decay():
    """Steps of either size that end a sample of the warm-up, and those that begin at one after it, have its rate."""
    for sample in range(BATCH, 161, BATCH):
        large, small = (REPORTED(consumed_samples=sample - size, batch_samples=size) for size in (BATCH, 8))
        assert large == small == pytest.approx(3e-4 * sample / 160)
    for sample in range(160, 1601, 8):
        large, small = (REPORTED(consumed_samples=sample, batch_samples=size) for size in (BATCH, 8))
        assert large == small == pytest.approx(3e-4 - 2.7e-4 * max(0, sample - 1280) / 320)


@st.composite
def schedules(draw):
    total = draw(st.integers(2, 10_000))
    warmup = draw(st.integers(0, total - 1))
    decay = draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))
    peak = draw(st.floats(1e-6, 1e-1))
    floor = draw(st.floats(0, 1)) * peak
    assume(floor < peak)
    return LearningRate(
        peak=peak,
        floor=floor,
        decay=decay,
        warmup_samples=warmup,
        decay_samples=draw(st.integers(1, total - warmup)) if decay == "wsd" else 0,
        total_samples=total,
    )


# Half-way between neighbours lies no number: the fall of one sample is rounded away.
NEIGHBOURS = LearningRate(peak=0.0625, floor=math.nextafter(0.0625, 0), decay="wsd", decay_samples=2, total_samples=2)


@given(schedule=schedules(), rows=st.integers(1, 10_000), batch=st.integers(1, 10_000))
@example(schedule=NEIGHBOURS, rows=1, batch=1)
@examples(200)
def test_declared_ends_are_met_exactly_whatever_the_batches_are(schedule, rows, batch):
    peak, floor, warmup, total = schedule.peak, schedule.floor, schedule.warmup_samples, schedule.total_samples
    if warmup:
        batch = min(batch, warmup)
        assert schedule(consumed_samples=warmup - batch, batch_samples=batch) == peak  # ends the warm-up
        assert schedule(consumed_samples=0, batch_samples=warmup - 1) < peak
    assert schedule(consumed_samples=warmup, batch_samples=rows) == peak
    if schedule.decay == "wsd":
        falling = schedule.decay_samples
        assert schedule(consumed_samples=total - falling, batch_samples=rows) == peak
        begun = schedule(consumed_samples=total - falling + 1, batch_samples=rows)
        assert floor <= begun <= peak
        assert begun < peak or (peak - floor) / falling <= 2 * math.ulp(peak)
    assert schedule(consumed_samples=total, batch_samples=rows) == (peak if schedule.decay == "constant" else floor)


@given(size=st.integers(1, 10_000), consumed=st.integers(0, 1599), rows=st.integers(1, 64))
def test_without_a_scaling_and_at_the_final_size_nothing_changes(size, consumed, rows):
    keys = {"peak": 3e-4, "floor": 1e-5, "decay": "cosine", "warmup_samples": 160, "total_samples": 1600}
    plain = LearningRate(**keys)(consumed_samples=consumed, batch_samples=rows)
    for scaling in ("none", "sqrt", "linear"):
        schedule = LearningRate(**keys, scaling=scaling, final_size=size)
        assert schedule(consumed_samples=consumed, batch_samples=rows, size=size) == plain
    assert LearningRate(**keys)(consumed_samples=consumed, batch_samples=rows, size=size) == plain


def test_a_scaling_takes_the_schedule_s_size_not_the_rows_that_an_epoch_leaves():
    keys = {"peak": 1.0, "floor": 0.5, "decay": "linear", "total_samples": 64, "final_size": 16}
    for scaling, factors in {"sqrt": (0.5, 2**0.5, 1.0), "linear": (0.25, 2.0, 1.0)}.items():
        schedule = LearningRate(**keys, scaling=scaling)
        for size, factor in zip((4, 32, 16), factors, strict=True):
            assert schedule(consumed_samples=32, batch_samples=3, size=size) == 0.75 * factor


def test_a_warm_up_and_a_decay_may_fill_the_run_and_no_more():
    # The last: both halves of 3, rounded up.
    for warmup, decay, total in [(0, 0, 1), (10, 0, 10), (0, 10, 10), (4, 6, 10), (2, 2, 3)]:
        require_room(warmup_samples=warmup, decay_samples=decay, total_samples=total)
    for warmup, decay, asked in [
        (1200, 400, "a warm-up of 1,200 samples and a decay of 400 samples"),
        (1502, 0, "a warm-up of 1,502 samples"),
        (1501, 0, "a warm-up of 1,501 samples"),
        (0, 1501, "a decay of 1,501 samples"),
    ]:
        with pytest.raises(ConfigError) as caught:
            require_room(warmup_samples=warmup, decay_samples=decay, total_samples=1500)
        assert str(caught.value).startswith(f"trainer.learning_rate_scheduler: {asked} in a run of 1,500\n")


# Adam's second beta over a batch that moves, against an Adam in plain numpy


FINAL = 16
RAMP = BatchSchedule.doubling(initial=4, final=FINAL, length_samples=96)  # 12 updates of 4 rows, 6 of 8, then 16
SIZES = [each.size for each in RAMP.stretches(num_rows=10_000, total_samples=256) for _ in range(each.num_steps)]
UP_AND_DOWN = [16, 16, 4, 4, 64, 1, 16, 8, 32, 16]
NAMES = [f"{page}{name}{bits}" for page in ("", "paged_") for name in ("adam", "adamw") for bits in ("", "_8bit")]
NEVER = 10**9  # elements from which on a state would have 8 bits


def settings(optimizer):
    trainer = {"type": "finetune", "optimizer": optimizer, "effective_batch_size": FINAL}
    return load_config({"base_model": "m", "adapter": "lora", "trainer": trainer}).config.trainer.optimizer


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


def moving(asked, parameters, *, final_size=FINAL):
    """An optimizer as a configuration asks for it, and its moving beta."""
    chosen = settings(asked)
    optimizer = build_optimizer(chosen, parameters)
    return optimizer, MovingBeta2(chosen, optimizer, final_size=final_size)


def train_weights(parameters, optimizer, rates, sizes, *, first=0):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        for update, size in enumerate(sizes, start=first):
            for parameter, gradient in zip(parameters, gradients(parameters, update), strict=True):
                parameter.grad = gradient
            rates.set(size=size, learning_rate=learning_rate(update))
            optimizer.step()
            rates.stepped()


def adam(parameters, asked, sizes):
    """Kingma and Ba 2015, algorithm 1, with a beta2 for each update, in float64; each weight's values in the end."""
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
            second_product *= present
            corrected = (largest if asked.get("amsgrad") else square) / (1 - second_product)
            weight = weight - rate * mean / (1 - first_product) / (np.sqrt(corrected) + eps)
        by_weight.append(weight)
    return by_weight


def assert_near(parameters, expected, *, rtol, atol):
    for actual, oracle in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), oracle, rtol=rtol, atol=atol)


ASKED = [
    {"type": "adam", "betas": [0.9, 0.99], "weight_decay": 0.3, "eps": 0.1},
    {"type": "adam", "betas": [0.8, 0.95], "weight_decay": 0.1, "amsgrad": True},
    {"type": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.3, "eps": 0.1},
    {"type": "adamw", "betas": [0.9, 0.999], "weight_decay": 0.1, "eps": 0.0, "amsgrad": True},
    {"type": "adamw", "betas": [0.0, 0.0], "weight_decay": 0.1, "eps": 1e-3},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: " ".join(map(str, asked.values())))
def test_over_a_ramp_it_is_adam_with_the_product_of_the_betas_used(asked):
    for sizes in (SIZES, UP_AND_DOWN):
        parameters = weights()
        expected = adam(parameters, asked, sizes)
        train_weights(parameters, *moving(asked, parameters), sizes)
        assert_near(parameters, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adafactor"])
def test_on_a_gpu_adam_is_one_kernel_and_elsewhere_as_before(name):
    built = {kind: build_optimizer(settings(name), weights(), device_type=kind) for kind in ("cuda", "mps", None)}
    fused = {kind: bool(optimizer.defaults.get("fused")) for kind, optimizer in built.items()}
    assert fused == {"cuda": name.startswith("adam"), "mps": False, None: False}


@pytest.mark.parametrize("path", ["foreach", "fused"])
def test_torch_s_other_ways_to_update_read_the_same_rates(path):
    asked, parameters = ASKED[2], weights()
    expected = adam(parameters, asked, UP_AND_DOWN)
    optimizer = torch.optim.AdamW(parameters, lr=0.0, **{path: True})
    train_weights(parameters, optimizer, MovingBeta2(settings(asked), optimizer, final_size=FINAL), UP_AND_DOWN)
    assert_near(parameters, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["adam_8bit", "adamw_8bit", "paged_adam", "paged_adamw"])
def test_bitsandbytes_adams_follow_it_with_32_bit_states(name):
    asked, parameters = {"type": name, "betas": [0.9, 0.99], "weight_decay": 0.3, "eps": 0.1}, weights(torch.float32)
    expected = adam(parameters, asked, SIZES)
    chosen = asked if "paged" in name else {**asked, "min_8bit_size": NEVER}
    train_weights(parameters, *moving(chosen, parameters), SIZES)
    assert_near(parameters, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_at_the_final_size_it_is_the_plain_optimizer_to_the_bit(name):
    asked = {"type": name, "weight_decay": 0.1}
    ours, theirs = weights(torch.float32), weights(torch.float32)
    optimizer, rates = moving(asked, ours)
    plain = build_optimizer(settings(asked), theirs)
    train_weights(ours, optimizer, rates, [FINAL] * 20)
    train_weights(theirs, plain, FixedBetas(plain), [FINAL] * 20)
    for key in ("lr", "eps", "weight_decay", "betas"):
        assert np.array_equal(*(each.param_groups[0][key] for each in (optimizer, plain)))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("asked", [ASKED[0], ASKED[2], {"type": "adamw_8bit", "weight_decay": 0.1, "min_8bit_size": 8}])
def test_it_goes_on_from_its_state_to_the_bit(asked):
    whole = weights(torch.float32)
    train_weights(whole, *moving(asked, whole), SIZES)
    for at in (5, 12, 18):  # within a phase, and at both switches
        part = weights(torch.float32)
        before, rates = moving(asked, part)
        train_weights(part, before, rates, SIZES[:at])
        saved = json.loads(json.dumps(rates.state()))
        tensors, numbers = optimizer_state(before)
        after, resumed = moving(asked, part)
        restore_optimizer(after, tensors, numbers)
        resumed.restore(saved)
        assert resumed.state() == rates.state()
        train_weights(part, after, resumed, SIZES[at:], first=at)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(part, whole, strict=True))


def test_beta2_moves_where_the_resolved_configuration_says_so_and_counts_the_updates_that_were_made():
    def rates_of(**keys):
        trainer = {"type": "finetune", "effective_batch_size": 16, **keys}
        source = {"base_model": "m", "adapter": "lora", "trainer": trainer}
        chosen = resolve(load_config(source).config, DeviceFacts(kind="cpu", bf16=False)).config.trainer
        optimizer = build_optimizer(chosen.optimizer, [nn.Parameter(torch.ones(2))])
        return optimizer, update_rates(chosen, optimizer, final_size=16)

    for keys, expected in [({}, FixedBetas), ({"batch_lr_scaling": "sqrt"}, MovingBeta2)]:
        assert type(rates_of(batch_rampup="64sp", **keys)[1]) is expected, keys
    optimizer, rates = rates_of()  # fixed betas set the learning rate alone, and keep nothing
    before = dict(optimizer.param_groups[0])
    rates.set(size=4, learning_rate=0.25)
    rates.stepped()
    assert optimizer.param_groups[0] == {**before, "lr": 0.25}
    assert rates.state() == {}
    _, rates = moving({"type": "adamw"}, weights())
    for _ in range(2):  # the first one was left out
        rates.set(size=4, learning_rate=0.1)
    rates.stepped()
    assert rates.state() == {"num_updates": 1, "exponents": 0.25}


# bitsandbytes' optimizers against torch's, and their 8-bit states


EIGHT_BITS = ["adam_8bit", "adamw_8bit", "lion_8bit", "sgd_8bit", "rmsprop_8bit", "adagrad_8bit"]
PAGED = ["paged_adam", "paged_adamw", "paged_lion", "paged_adam_8bit", "paged_adamw_8bit", "paged_lion_8bit"]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2."""

    def __init__(self, parameters, lr, betas, weight_decay):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (slow, slower), lr = group["betas"], group["lr"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                update = (slow * momentum + (1 - slow) * weight.grad).sign() + group["weight_decay"] * weight
                weight.sub_(lr * update)
                momentum.mul_(slower).add_(weight.grad, alpha=1 - slower)


ORACLES = {
    "lion": lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    "lion_8bit": lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    # bitsandbytes' Adam takes the decay off as AdamW does.
    "adam_8bit": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_8bit": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd_8bit": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "rmsprop_8bit": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1),
    "adagrad_8bit": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", ORACLES)
def test_with_32_bit_states_they_are_the_usual_ones(name):
    given = {"type": name, "weight_decay": 0.1}
    models = [small_net(), small_net()]
    ours = settings(given if name == "lion" else {**given, "min_8bit_size": NEVER})
    train_net(models[0], build_optimizer(ours, models[0].parameters()), steps=5, seed=1)
    train_net(models[1], ORACLES[name](models[1].parameters()), steps=5, seed=1)
    for mine, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_states_have_8_bits_from_the_given_size_on_and_stay_near(name):
    models = [small_net(), small_net()]
    optimizers = [
        build_optimizer(settings({"type": name, "min_8bit_size": size}), model.parameters())
        for model, size in zip(models, (64, NEVER), strict=True)
    ]
    start = [weight.detach().clone() for weight in models[0].parameters()]
    for model, optimizer in zip(models, optimizers, strict=True):
        train_net(model, optimizer, steps=5, seed=1)
    dtypes = [optimizers[0].state[weight]["state1"].dtype for weight in models[0].parameters()]
    assert dtypes == [torch.uint8, torch.float32, torch.uint8, torch.float32]
    for near, exact, first in zip(models[0].parameters(), models[1].parameters(), start, strict=True):
        moved = (exact - first).norm()
        assert moved > 0
        assert (near - exact).norm() < 0.25 * moved


def test_paged_states_are_refused_where_there_are_none():
    for name in PAGED:
        config = load_config({"base_model": "m", "trainer": {"type": "finetune", "optimizer": name}}).config
        for kind in ("cpu", "mps"):
            with pytest.raises(ConfigError, match=rf"{name} needs a CUDA device.*\n  fix: .*type: {name[6:]}$"):
                resolve(config, DeviceFacts(kind=kind, bf16=False))
        assert resolve(config, DeviceFacts(kind="cuda", bf16=True)).config.trainer.optimizer.type == name
        assert settings(name.removeprefix("paged_"))
