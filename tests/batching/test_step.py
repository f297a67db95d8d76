"""A step that runs out of memory begins anew, in smaller pieces, and ends as if it had not."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.batching.cutter import CapChange
from brim.batching.microbatch import MicroBatch, cut_by_rows
from brim.batching.step import GradientStep

LENGTHS = np.array([5, 3, 8, 2, 7, 4, 6, 3])
MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation."


class Halving:
    """At most so many rows; half of them after each failure."""

    def __init__(self, max_rows):
        self.max_rows = max_rows
        self.num_clean = 0

    def cut(self, lengths):
        return [
            MicroBatch(rows=rows, padded_length=int(lengths[rows].max()), peak_bytes=100 * len(rows))
            for rows in cut_by_rows(lengths, max_rows=self.max_rows)
        ]

    def lower(self, failed):
        if failed.num_rows == 1:
            return None
        before, self.max_rows = self.max_rows, max(1, failed.num_rows // 2)
        return CapChange(before=before, after=self.max_rows, unit="rows")

    def clean_step(self):
        self.num_clean += 1


class FailsWhenTold(torch.autograd.Function):
    """Forwards its input, and fails in the pass of which `fail` says so."""

    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        fail("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.fail("backward")
        return gradient, None


class Task:
    """A regression whose pass number `n` (from 0, replays counted on) fails where `failures` says."""

    def __init__(self, max_rows, failures=(), error=torch.OutOfMemoryError, dropout=0.0, checkpointed=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2))
        self.inputs, self.targets = torch.randn(len(LENGTHS), 6), torch.randn(len(LENGTHS), 2)
        self.failures = dict(failures)
        self.error = error
        self.checkpointed = checkpointed
        self.num_passes = 0
        self.cutter = Halving(max_rows)
        self.events = []
        self.born = []  # weak references to what each pass makes
        self.alive_at_start = []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = GradientStep(
            cutter=self.cutter,
            parameters=list(self.model.parameters()),
            backward=self.backward,
            on_event=self.events.append,
            module=self.model,
        )

    def backward(self, rows):
        self.alive_at_start.append(sum(reference() is not None for reference in self.born))
        number, self.num_passes = self.num_passes, self.num_passes + 1

        def fail(place):
            if self.failures.get(number) == place:
                raise self.error(MEMORY)

        hidden = self.model[:3](self.inputs[rows])
        if self.checkpointed:
            hidden = checkpoint(FailsWhenTold.apply, hidden, fail, use_reentrant=False)
        else:
            hidden = FailsWhenTold.apply(hidden, fail)
        output = self.model[3](hidden)
        loss = (output - self.targets[rows]).square().sum() / len(LENGTHS)
        self.born += [weakref.ref(tensor) for tensor in (hidden, output, loss)]
        loss.backward()
        return loss.detach()

    def train(self, num_steps=3):
        """The losses; and the gradients of each step, as one vector."""
        losses, gradients = [], []
        for _ in range(num_steps):
            losses.append(self.step.run(LENGTHS).loss)
            gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
            self.optimizer.step()
        return losses, gradients

    def kinds(self):
        return [event["event"] for event in self.events]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("number", range(4))
def test_a_failure_at_any_micro_batch_changes_nothing_but_the_cut(number, where):
    clean = Task(max_rows=2).train()
    task = Task(max_rows=2, failures={number: where})
    losses, gradients = task.train()
    assert losses == pytest.approx(clean[0], rel=1e-6)
    for expected, actual in zip(clean[1], gradients, strict=True):
        assert (actual - expected).norm() / expected.norm() < 1e-6
    assert task.kinds() == ["oom", "cap", "replay"]
    assert task.events == [
        {
            "event": "oom",
            "micro_batch": number + 1,
            "num_micro_batches": 4,
            "rows": 2,
            "padded_length": [8, 6, 4, 3][number],
            "predicted_bytes": 200,
            "where": where,
            "message": "CUDA out of memory. Tried to allocate 2.00 GiB.",
        },
        {"event": "cap", "before": 2, "after": 1, "unit": "rows"},
        {"event": "replay", "num_micro_batches": 8},
    ]
    assert task.num_passes == (number + 1) + 3 * 8


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_given_the_same_cuts_all_is_bit_equal(where, dropout):
    clean = Task(max_rows=2, dropout=dropout).train()
    task = Task(max_rows=4, failures={1: where}, dropout=dropout)
    losses, gradients = task.train()
    assert losses == clean[0]
    assert all(torch.equal(expected, actual) for expected, actual in zip(clean[1], gradients, strict=True))
