"""A step that measures its noise: the gradient it would have anyway, and each micro-batch's own norm."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.train.scarce import CPU, Given, Shortage, apart, equal, make_model, rows_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.batching import ByRows, NoiseMeasurement
from brim.data.tokens import collate
from brim.distributed import ALONE
from brim.errors import OutOfMemoryError
from brim.models import LLM, precision
from brim.models.loss import NextToken
from brim.train.gradient import Gradient, GradientNorms

BATCH = np.array([3, 17, 8, 0, 11, 5, 14, 2, 19, 7, 12, 1])
FEW = BATCH[:5]


def gradient_of(model, *, cutter=None, scaler=None, rows=None, events=None):
    """What Gradient reads of a job; no more of it is needed."""
    llm = LLM(model=model, folder=None, device=CPU, precision=precision("fp32"), objective=NextToken())
    given = {"rows": rows or rows_of(), "cutter": cutter or ByRows(max_rows=4)}
    job = SimpleNamespace(llm=llm, pad_id=1, ranks=ALONE, sharded=None, **given)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    return Gradient(job, scaler, (lambda event: None) if events is None else events.append)


def summed(gradient, indices, **settings):
    rows = gradient._job.rows
    return gradient.sum(indices, int(rows.num_supervised[indices].sum()), step=0, **settings)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_autograd(model, indices, groups):
    """The measurement from each group's gradient, computed apart, in fp64."""
    rows = rows_of()
    num_supervised = int(rows.num_supervised[indices].sum())
    parameters = [p for p in model.parameters() if p.requires_grad]
    shares = []
    for group in groups:
        batch = collate([rows[int(i)] for i in indices[group]], pad_id=1)
        loss = NextToken().loss(model, batch) / num_supervised
        shares.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, parameters)]))
    expected = NoiseMeasurement.of(
        squared_sum=float(sum(shares).square().sum()),
        squared_shares=[float(share.square().sum()) for share in shares],
        weights=[int(rows.num_supervised[indices[group]].sum()) for group in groups],
        num_rows=len(indices),
    )
    return pytest.approx((expected.squared_gradient, expected.gradient_variance), rel=1e-5)


def figures(measurement):
    return measurement.squared_gradient, measurement.gradient_variance


def tied():
    model = make_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def checkpointed():
    model = make_model()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


def adapted():
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(make_model(), settings)


@pytest.mark.parametrize("make", [make_model, tied, checkpointed, adapted])
def test_measurements_are_of_gradients_computed_apart_and_gradients_those_of_the_same_cut_without_measuring(make):
    model = make()
    gradient = gradient_of(model)
    outcome = summed(gradient, BATCH, measures_noise=True)
    measured = grads(model)
    groups = [part.micro_batch.rows.tolist() for part in outcome.parts]
    assert groups == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9], [10], [11]]
    assert figures(gradient.noise) == by_autograd(model, BATCH, groups)
    same_cut = Given([[part.micro_batch for part in outcome.parts]])
    same = summed(gradient_of(model, cutter=same_cut), BATCH)
    assert outcome.loss == same.loss
    assert equal(measured, grads(model))
    usual = summed(gradient_of(model), BATCH)
    assert len(usual.parts) == 3
    assert outcome.loss == pytest.approx(usual.loss, rel=1e-5)
    assert apart(measured, grads(model)) < 1e-6
    if make is make_model:  # a batch of few rows is measured row by row
        summed(gradient, FEW, measures_noise=True)
        assert figures(gradient.noise) == by_autograd(model, FEW, [[row] for row in range(5)])


def test_no_measurement_without_noise_to_measure_or_a_finite_gradient_and_a_loss_scale_is_divided_out():
    model = make_model()
    gradient = gradient_of(model)
    summed(gradient, FEW, measures_noise=True)
    assert gradient.noise is not None
    scaled = gradient_of(model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=True))
    summed(scaled, FEW, measures_noise=True)
    assert scaled.noise == gradient.noise  # to the bit, since scales are powers of two
    summed(gradient, FEW)
    assert gradient.noise is None
    summed(gradient, FEW[:1], measures_noise=True)
    assert gradient.noise is None
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model.lm_head.weight[5, 0] = math.nan
    summed(gradient, FEW, measures_noise=True)
    assert gradient.noise is None


@pytest.mark.parametrize("number", [1, 2, 6])
def test_a_step_that_begins_anew_is_measured_anew_in_order(number):
    indices = np.concatenate([BATCH, BATCH[:11] % 7])  # groups of three rows, and two rows in the last
    model, events = make_model(), []
    gradient = gradient_of(model, events=events)
    Shortage(model, backward=[number])
    outcome = summed(gradient, indices, measures_noise=True)
    assert [event["event"] for event in events] == ["oom", "cap", "replay"]
    assert outcome.num_out_of_memory == 1
    assert np.concatenate([part.micro_batch.rows for part in outcome.parts]).tolist() == list(range(23))
    assert len(outcome.parts) == 23
    expected, noise = grads(model), gradient.noise
    smaller = gradient_of(model, cutter=ByRows(max_rows=1))
    summed(smaller, indices, measures_noise=True)
    assert smaller.noise == noise
    assert equal(expected, grads(model))


def test_hooks_are_there_while_a_step_is_measured_and_not_after_it_failed():
    model = make_model()
    gradient, num_parameters = gradient_of(model, cutter=ByRows(max_rows=1)), len(list(model.parameters()))

    def num_hooks():
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    seen = []
    with model.register_forward_hook(lambda *_: seen.append(num_hooks())):
        summed(gradient, FEW, measures_noise=True)
        summed(gradient, FEW)
    assert seen == [num_parameters] * 5 + [0] * 5
    Shortage(model, forward=range(1, 100))
    with pytest.raises(OutOfMemoryError, match="ran out of memory twice"):
        summed(gradient, FEW, measures_noise=True)
    assert num_hooks() == 0
    assert all(p.grad is None for p in model.parameters())


def test_beside_the_sums_there_is_never_more_than_one_gradient():
    model = make_model()
    parameters = list(model.parameters())
    alive = []
    for parameter in parameters:  # is told before the meter: its hooks are there first
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    summed(gradient_of(model), BATCH, measures_noise=True)
    assert alive == [1] * 8 * len(parameters)


def test_a_norm_of_many_weights_is_exact():
    """Sums over millions of numbers one after the other would be off by 1e-5 and more."""
    weight = nn.Parameter(torch.zeros(3_000_001))
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    with GradientNorms([weight]) as norms:
        norms.drop()
        for _ in range(2):
            (weight * values).sum().backward()
            norms.end_group()
        norms.end()
    exact = float(values.double().square().sum())
    assert norms.squared() == pytest.approx([exact, exact, 4 * exact], rel=1e-6)


def test_a_gradient_that_comes_in_pieces_is_refused():
    weight = nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    with GradientNorms([weight]), pytest.raises(AssertionError, match="in pieces"):
        for _ in range(2):
            x = checkpoint(lambda x: x * weight, x, use_reentrant=True)
        x.sum().backward()


def test_a_weight_without_a_part_in_a_micro_batch_counts_as_nothing():
    """As an expert that no token was sent to."""
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    with GradientNorms(list(model.parameters())) as norms:
        norms.drop()
        for number, x in enumerate(([3.0, 4.0], [1.0, 2.0], [5.0, 6.0])):
            model[number % 2](torch.tensor(x)).backward()
            norms.end_group()
        norms.end()
    assert norms.squared() == pytest.approx([25.0, 5.0, 61.0, 64.0 + 100.0 + 5.0])
    assert model[0].weight.grad.tolist() == [[8.0, 10.0]]
