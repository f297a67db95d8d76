"""Scores of rows in batches against each row alone."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from brim.infer import score_rows
from brim.infer.engines import RowsAtOnce


@pytest.mark.parametrize("batch_rows", [1, 4, 64])
def test_scores_equal_those_of_each_row_alone_in_order(model, rows, on_cpu, batch_rows):
    scores = score_rows(model, rows, pad_id=1, batch_rows=batch_rows, **on_cpu)
    assert scores.keys.tolist() == [row.key for row in rows]
    assert scores.num_supervised.tolist() == [len(row.input_ids) - 1 for row in rows]
    for number, row in enumerate(rows):
        ids = torch.tensor([row.input_ids.tolist()])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        losses = cross_entropy(logits, ids[0, 1:], reduction="sum") if len(row.input_ids) > 1 else torch.tensor(0.0)
        assert scores.loss[number] == pytest.approx(losses.item(), rel=1e-5)
        assert scores.num_correct[number] == int((logits.argmax(-1) == ids[0, 1:]).sum())


def test_rows_in_another_order_have_the_same_scores(model, rows, on_cpu):
    order = np.random.default_rng(3).permutation(len(rows))
    scores = score_rows(model, rows, pad_id=1, batch_rows=4, **on_cpu)
    shuffled = score_rows(model, rows.take(order), pad_id=1, batch_rows=4, **on_cpu)
    assert shuffled.keys.tolist() == scores.keys[order].tolist()
    np.testing.assert_allclose(shuffled.loss, scores.loss[order], rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_put_back(model, rows, on_cpu, training):
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
            self.modes = []

        def forward(self, **inputs):
            self.modes.append(self.training)
            return self.inner(**inputs)

    noisy = Noisy().train(training)
    scores = score_rows(noisy, rows.take([0, 2]), pad_id=1, batch_rows=2, **on_cpu)
    assert noisy.modes == [False]
    assert noisy.training is training
    assert np.isfinite(scores.loss).all()
    model.eval()


def test_no_gradient_is_kept(model, rows, on_cpu):
    score_rows(model, rows.take([0]), pad_id=1, batch_rows=2, **on_cpu)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_scores_are_the_same_where_memory_ran_out_on_the_way(model, rows, on_cpu):
    def scarce(module, inputs, output):
        if len(output.logits) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    at_once = RowsAtOnce(8)
    hook = model.register_forward_hook(scarce)
    try:
        scores = score_rows(model, rows, pad_id=1, batch_rows=at_once, **on_cpu)
    finally:
        hook.remove()
    same = score_rows(model, rows, pad_id=1, batch_rows=2, **on_cpu)
    assert at_once.num_rows == 2
    np.testing.assert_array_equal(scores.loss, same.loss)
    np.testing.assert_array_equal(scores.num_correct, same.num_correct)
    np.testing.assert_array_equal(scores.num_supervised, same.num_supervised)
