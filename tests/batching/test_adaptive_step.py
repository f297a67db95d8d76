"""The gradient of a batch of any size, in a loop of one's own."""

import copy
import json
import logging
import math
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, strategies as st
from torch import nn

import brim
from brim.batching import AdaptiveStep
from brim.batching.adaptive_step import count_rows, take_rows

MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def make_model(dtype=torch.float32, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(dtype)


def make_batch(num_rows=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_rows, 5, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 3, (num_rows,), generator=generator)


def loss_of(model, *, most_rows=None, reduction="sum"):
    """The cross-entropy; more than `most_rows` run out of memory."""

    def loss(batch):
        inputs, targets = batch
        if most_rows is not None and len(inputs) > most_rows:
            raise torch.OutOfMemoryError(MEMORY)
        return F.cross_entropy(model(inputs), targets, reduction=reduction)

    return loss


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def oracle(model, batch):
    """The loss and gradient of PyTorch's own mean over the whole batch."""
    other = copy.deepcopy(model)
    loss = F.cross_entropy(other(batch[0]), batch[1])
    loss.backward()
    return loss.item(), gradient(other)


def assert_as_whole(model, step, batch, expected, *, tolerance=1e-6):
    assert step(batch) == pytest.approx(expected[0], rel=max(tolerance, 1e-7))
    assert (gradient(model) - expected[1]).norm() / expected[1].norm() < tolerance


def noting(inner, note):
    """A loss that notes something of each batch that it is given, and its notes."""
    notes = []

    def loss(batch):
        notes.append(note(batch))
        return inner(batch)

    return loss, notes


def sizes_seen(inner):
    return noting(inner, lambda batch: len(batch[0]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("most_rows", [None, 7, 1])
def test_the_gradient_is_that_of_the_whole_batch(dtype, tolerance, most_rows):
    for max_rows in (None, 12, 5, 1):
        model, batch = make_model(dtype), make_batch(dtype=dtype)
        expected, events = oracle(model, batch), []
        step = AdaptiveStep(model, loss_of(model, most_rows=most_rows), max_rows=max_rows, on_event=events.append)
        assert_as_whole(model, step, batch, expected, tolerance=tolerance)
        assert_as_whole(model, step, batch, expected, tolerance=tolerance)  # gradients from before are dropped
        assert bool(events) == (most_rows is not None and most_rows < (max_rows or 12))
        assert step._batch is None  # it is not kept


def test_the_smaller_size_is_kept_and_each_halving_told():
    model, events = make_model(), []
    loss, sizes = sizes_seen(loss_of(model, most_rows=4))
    step = AdaptiveStep(model, loss, on_event=events.append, check=False)
    step(make_batch())
    assert sizes == [12, 6, 3, 3, 3, 3]
    step(make_batch(num_rows=5))
    assert sizes[6:] == [3, 2]
    oom = {"event": "oom", "micro_batch": 1, "num_micro_batches": 1, "rows": 12, "where": "forward", "message": MEMORY}
    assert events[0] == oom
    assert [event for event in events if event["event"] != "oom"] == [
        {"event": "cap", "before": 12, "after": 6, "unit": "rows"},
        {"event": "replay", "num_micro_batches": 2},
        {"event": "cap", "before": 6, "after": 3, "unit": "rows"},
        {"event": "replay", "num_micro_batches": 4},
    ]
    loss, sizes = sizes_seen(loss_of(model))  # the state survives JSON and cuts the same
    resumed = AdaptiveStep(model, loss, check=False)
    resumed.load_state_dict(json.loads(json.dumps(step.state_dict())))
    resumed(make_batch())
    assert sizes == [3, 3, 3, 3]


def test_a_batch_that_fits_goes_through_untouched_and_neighbours_are_views():
    model, batch = make_model(), make_batch()
    loss, seen = noting(loss_of(model), lambda given: given)
    AdaptiveStep(model, loss, check=False)(batch)
    assert len(seen) == 1
    assert seen.pop() is batch
    AdaptiveStep(model, loss, max_rows=5, check=False)(batch)
    assert {piece[0].untyped_storage().data_ptr() for piece in seen} == {batch[0].untyped_storage().data_ptr()}
    assert len(seen) == 3


def test_weights_and_losses_of_each_row_are_those_of_the_whole_batch():
    model, batch = make_model(), make_batch()
    each = AdaptiveStep(model, loss_of(model, reduction="none"), max_rows=5)
    assert_as_whole(model, each, batch, oracle(model, batch))
    inputs, targets = batch
    targets[:7] = -100

    def loss(batch):
        return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum", ignore_index=-100)

    step = AdaptiveStep(model, loss, max_rows=3, weight=lambda batch: (batch["targets"] != -100).sum())
    # PyTorch's mean leaves out -100, too
    assert_as_whole(model, step, {"inputs": inputs, "targets": targets}, oracle(model, batch))
    squares = AdaptiveStep(model, lambda batch: model(batch).square().sum(), max_rows=5)
    assert squares(inputs) == pytest.approx(model(inputs).square().sum().item() / 12, rel=1e-6)  # one tensor is a batch


Pair = namedtuple("Pair", ["inputs", "targets"])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
@example([0, 2, 1, 3])  # looks like neighbours
def test_rows_are_taken_in_the_order_that_is_asked_for_from_columns_of_any_form(rows):
    tensor = torch.arange(6)
    named = Pair(tensor, OrderedDict(names=list("abcdef")))
    columns = {"tensor": tensor, "array": np.arange(6), "pair": (tensor, 7), "list": [tensor], "named": named}
    taken = take_rows(columns, np.array(rows), samples=False)
    assert [type(column) for column in taken.values()] == [torch.Tensor, np.ndarray, tuple, list, Pair]
    by_row = [taken["tensor"], taken["array"], taken["pair"][0], taken["list"][0], taken["named"].inputs]
    assert [column.tolist() for column in by_row] == [rows] * 5
    assert (taken["pair"][1], taken["named"].targets) == (7, OrderedDict(names=["abcdef"[row] for row in rows]))
    assert type(taken["named"].targets) is OrderedDict
    assert take_rows(list(range(6)), np.array(rows), samples=True) == rows


def sequences():
    """Samples of different lengths, and what their tokens' mean loss is."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(length, 5, generator=generator) for length in (3, 9, 2, 7, 4, 8, 2, 5)]


def padded_loss(model, shapes, most_tokens=None):
    def loss(samples):
        padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        shapes.append(tuple(padded.shape[:2]))
        if most_tokens is not None and padded.shape[0] * padded.shape[1] > most_tokens:
            raise torch.OutOfMemoryError(MEMORY)
        mask = torch.arange(padded.shape[1]) < torch.tensor([len(sample) for sample in samples])[:, None]
        return model(padded).square().sum(-1)[mask].sum()

    return loss


def test_samples_are_cut_by_length_under_a_limit_in_padded_tokens():
    model, shapes, events, samples = make_model(), [], [], sequences()

    def lengths(samples):
        return torch.tensor([len(sample) for sample in samples])

    asked = {"lengths": lambda samples: lengths(samples).tolist(), "weight": lambda samples: lengths(samples).sum()}
    scarce = padded_loss(model, shapes, most_tokens=24)
    step = AdaptiveStep(model, scarce, **asked, samples=True, on_event=events.append, check=False)
    loss, tokens = step(samples), torch.cat(samples)
    assert loss == pytest.approx(model(tokens).square().sum().item() / len(tokens), rel=1e-6)
    caps = [event for event in events if event["event"] == "cap"]
    # 8 × 9 tokens run out of memory; then 3 × 9, beside 5 × 5.
    assert [(cap["before"], cap["after"], cap["unit"]) for cap in caps] == [(72, 50, "tokens"), (50, 18, "tokens")]
    outs = [event for event in events if event["event"] == "oom"]
    assert [(out["padded_length"], "predicted_bytes" in out) for out in outs] == [(9, False)] * 2
    shapes.clear()
    step(samples)
    assert all(rows * length <= 18 for rows, length in shapes)
    assert sum(rows for rows, _ in shapes) == len(samples)
    # Limits that are given hold from the start; lengths may be a tensor.
    shapes.clear()
    AdaptiveStep(model, padded_loss(model, shapes), lengths=lengths, max_tokens=20, max_rows=3, samples=True)(samples)
    assert shapes[:3] == [(1, 3), (2, 3), (3, 3)]  # the check
    assert all(rows <= 3 and rows * length <= 20 for rows, length in shapes[3:])
    assert sorted(rows for rows, _ in shapes[3:]) == [1, 2, 2, 3]  # [7], [9, 8], [2, 2], [5, 4, 3]


def test_a_loss_scale_is_applied_to_the_gradient_alone():
    model, batch = make_model(), make_batch()
    expected_loss, expected = oracle(model, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert AdaptiveStep(model, loss_of(model), max_rows=5, scale=scaler.scale)(batch) == pytest.approx(expected_loss)
    assert (gradient(model) / 1024 - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 2), (torch.float16, 3)])
def test_a_sum_in_sixteen_bits_is_warned_of_once(dtype, digits):
    """1,001 rows of a loss of 1: the sum is 1,000 in bfloat16. Shares are added up in 32 bits."""
    model, batch = nn.Linear(1, 1, bias=False).to(dtype), torch.ones(1001, 1, dtype=dtype)
    nn.init.ones_(model.weight)
    step = AdaptiveStep(model, lambda batch: model(batch).sum(), check=False)
    words = rf"the loss is a sum in {str(dtype)[6:]}, which keeps about {digits} decimal digits(.|\n)*loss\.float\(\)"
    with pytest.warns(UserWarning, match=words):
        assert (step(batch) == 1.0) == (dtype == torch.float16)
    step(batch)  # a warning would be an error
    each, total = (lambda batch: model(batch).squeeze(-1)), (lambda batch: model(batch).float().sum())
    for max_rows, remedy, rel in ((1, each, 1e-4), (100, each, 1e-6), (100, total, 1e-6)):
        assert AdaptiveStep(model, remedy, max_rows=max_rows, check=False)(batch) == pytest.approx(1.0, rel=rel)


def test_rows_are_counted():
    nested = {"x": [torch.zeros(4), {"y": np.zeros((4, 2))}], "names": ["a", "b", "c", "d"]}
    mixed = (torch.zeros(3, 2), torch.tensor(1.0), None, "text")
    assert [count_rows(batch, samples=False) for batch in (torch.zeros(3, 2), nested, mixed)] == [3, 4, 3]
    assert count_rows([torch.zeros(9), torch.zeros(2)], samples=True) == 2


def test_frozen_parameters_get_no_gradient_and_later_ones_are_dropped_with_the_others():
    model = make_model()
    model[0].requires_grad_(False)
    AdaptiveStep(model, loss_of(model), max_rows=5)(make_batch())
    assert [parameter.grad is None for parameter in model.parameters()] == [True, True, False, False]
    model = make_model()

    def inner(batch):
        if len(sizes) == 3:
            raise torch.OutOfMemoryError(MEMORY)
        return loss_of(model)(batch)

    loss, sizes = sizes_seen(inner)
    step = AdaptiveStep(model, loss, max_rows=8, on_event=[].append, check=False)
    step(make_batch(num_rows=4))
    model.append(nn.Linear(3, 3))
    assert_as_whole(model, step, make_batch(), oracle(model, make_batch()))
    assert sizes == [4, 8, 4, 2, 2, 2, 2, 2, 2]


def test_other_errors_pass_through_failures_are_logged_and_a_row_that_never_fits_is_named(caplog):
    model = make_model()
    with pytest.raises(KeyError, match="inputs"):
        AdaptiveStep(model, lambda batch: {}["inputs"])(make_batch())
    with caplog.at_level(logging.WARNING, logger="brim"):
        AdaptiveStep(model, loss_of(model, most_rows=6))(make_batch())
    out = f"out of memory in the forward pass of 12 rows: {MEMORY}"
    assert caplog.messages == [out, "at most 6 rows at a time from now on"]
    step = AdaptiveStep(model, loss_of(model, most_rows=0), on_event=[].append)
    with pytest.raises(brim.OutOfMemoryError, match=r"^row 0 of the batch ran out of memory twice in the forward pass"):
        step(make_batch())


def test_batch_norm_is_warned_of_once_it_is_cut():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    AdaptiveStep(model, loss_of(model))(make_batch())
    pieces = AdaptiveStep(model, loss_of(model), max_rows=6)
    with pytest.warns(UserWarning, match="BatchNorm1d '1' normalises over the rows of a piece"):
        pieces(make_batch())
    model.eval()
    pieces(make_batch())


# Mistakes


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_mean_is_noticed(dropout):
    model = make_model(dropout=dropout)
    with pytest.raises(brim.InputError, match="the loss function averages: two copies of a row have the loss of one"):
        AdaptiveStep(model, loss_of(model, reduction="mean"))(make_batch())
    assert model.training
    AdaptiveStep(model, loss_of(model, reduction="mean"), check=False)(make_batch())
    # A sum that grows by chance and one that is zero are not means.
    AdaptiveStep(model, lambda batch: (model(batch) * torch.randn(len(batch), 3)).sum())(make_batch()[0])
    AdaptiveStep(model, lambda batch: (model(batch) * 0).sum())(make_batch()[0])


def test_the_check_leaves_no_trace():
    model, found = make_model(dropout=0.5), []
    model[0].eval()

    def note(batch):
        torch.rand(1)
        return len(batch[0]), model.training, model[0].training

    loss, calls = noting(loss_of(model), note)
    for check in (True, False):
        torch.manual_seed(5)
        AdaptiveStep(model, loss, check=check)(make_batch())
        found.append((torch.rand(1).item(), gradient(model).tolist()))
    assert calls == [(1, False, False), (2, False, False), (3, False, False), *[(12, True, False)] * 2]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ((torch.zeros(8, 5), torch.zeros(7)), {}, r"different numbers of rows: batch\[0\] has 8, batch\[1\] has 7"),
        ({"x": (torch.zeros(4, 5), np.zeros(3))}, {}, r"batch\['x'\]\[0\] has 4, batch\['x'\]\[1\] has 3"),
        ((torch.zeros(0, 5), torch.zeros(0)), {}, "an empty batch"),
        ([], {"samples": True}, "an empty batch"),
        ((torch.tensor(1.0),), {}, "a list without a tensor"),
        ([{"x": 1}, {"x": 2}], {}, "fix: samples=True, if these are samples"),
        (None, {}, "a batch of type NoneType"),
        ({"x": torch.zeros(3, 5)}, {"samples": True}, "samples=True, and the batch is a dict"),
        *((make_batch(), {"weight": lambda _, w=weight: w}, r"weight\(batch\) is ") for weight in (0, -1.0, math.nan)),
        (make_batch(), {"lengths": lambda _: [1, 2, 3]}, r"lengths\(batch\) has shape \(3,\)\n.* for each of the 12"),
        (make_batch(), {"max_rows": 0}, "max_rows is 0"),
        (make_batch(), {"max_tokens": 0, "lengths": len}, "max_tokens is 0"),
        (make_batch(), {"max_tokens": 5}, "max_tokens without lengths"),
    ],
)
def test_batches_that_cannot_be_cut_and_options_that_contradict_each_other(batch, options, message):
    model = make_model()
    with pytest.raises(brim.InputError, match=message):
        AdaptiveStep(model, loss_of(model), **options)(batch)


@pytest.mark.parametrize("check", [True, False])
def test_a_loss_that_teaches_nothing(check):
    model = make_model()
    for wrong, message in [
        (lambda batch: model(batch[0]).sum().item(), r"loss\(batch\) is a float"),
        (lambda batch: (model(batch[0]).sum(), None), r"loss\(batch\) is a tuple"),
        (lambda batch: model(batch[0]).sum().detach(), r"loss\(batch\) has no gradient"),
    ]:
        with pytest.raises(brim.InputError, match=message):
            AdaptiveStep(model, wrong, check=check)(make_batch())


def test_models_that_cannot_be_used():
    model = make_model()
    parallel = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)  # without processes
    with pytest.raises(brim.InputError, match=r"fix: AdaptiveStep\(model\.module, …\), and all-reduce"):
        AdaptiveStep(parallel, loss_of(model))
    with pytest.raises(brim.InputError, match="given a generator as the model"):
        AdaptiveStep(model.parameters(), loss_of(model))
    with pytest.raises(brim.InputError, match="no parameter of the model learns"):
        AdaptiveStep(model.requires_grad_(False), loss_of(model))
