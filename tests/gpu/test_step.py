"""A CUDA device that runs out of memory in the middle of a step."""

import pytest
import torch
from torch import nn

import brim

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, ROWS = 1 << 16, 256


def train(limit_bytes=None, max_rows=None):
    """The loss of a step, the events, and the bytes that are allocated after it."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Tanh(), nn.Dropout(0.1))]
    model = nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1)).cuda()
    rows = torch.randn(ROWS, 8)
    events = []
    step = brim.AdaptiveStep(
        model, lambda batch: model(batch.cuda()).square().sum(), max_rows=max_rows, on_event=events.append
    )
    step(rows[:4])  # cuBLAS's workspaces
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    if limit_bytes is not None:
        allowed_bytes = torch.cuda.memory_reserved() + limit_bytes
        torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.mem_get_info()[1])
    torch.manual_seed(1)
    try:
        loss = step(rows)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return loss, events, torch.cuda.memory_allocated() - before_bytes


def test_a_step_that_runs_out_of_memory_ends_as_one_with_these_cuts():
    """A row keeps about 1.3 MB, so 256 take 340 MB."""
    loss, events, left_bytes = train(limit_bytes=160 << 20)
    max_rows = [event["after"] for event in events if event["event"] == "cap"][-1]
    assert max_rows < ROWS
    free_loss, free_events, _ = train(max_rows=max_rows)
    assert free_events == []
    assert loss == pytest.approx(free_loss, rel=1e-5)  # with dropout: the same numbers were drawn
    assert left_bytes == 0  # the gradients that were there before have been replaced
