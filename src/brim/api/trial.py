"""Micro-batches of real rows, tried on the device at hand as in the midst of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from brim.api.plan_request import PlanRequest
from brim.batching.ballast import gradients_at_hand, standing_for
from brim.batching.caches import free_caches
from brim.batching.no_trace import no_trace
from brim.batching.peak_meter import AddressSpacePeak, Counts, peak_meter
from brim.batching.probe import Probe
from brim.batching.prober import Prober
from brim.config import FinetuneTrainer
from brim.memory.napkin_settings import optimizer_of
from brim.memory.trained import Trained, optimizer_state
from brim.models.llm import LLM
from brim.planning.budget import Budget
from brim.planning.probe_rows import rows_of_shape
from brim.train.micro_batch_pass import MicroBatchPass


class Trial:
    """Micro-batches of real rows as in the midst of a step: gradients at hand, ballast for the optimizer's state."""

    def __init__(self, request: PlanRequest, llm: LLM, pad_id: int, *, state_bytes: int) -> None:
        self._lengths, self._num_supervised = request.rows.lengths, request.rows.num_supervised
        self._llm, self._state_bytes = llm, state_bytes
        self._is_warm = False
        self._pass = MicroBatchPass(
            model=llm.model,
            head=llm.head,
            rows=request.rows,
            pad_id=pad_id,
            device=llm.device,
            precision=llm.precision,
            scaler=torch.amp.GradScaler(llm.device.type, enabled=False),
            row_dropout=llm.row_dropout,
        )

    def probe(self, rows: int, tokens: int) -> Probe:
        """Try a shape. Its peak is in bytes allocated, as a plan counts them."""
        device = self._llm.device
        if device.type == "cuda":
            return self._prober(tokens, counts="allocated")(rows)
        self.warm_up()
        meter = peak_meter(device)
        meter.begin()
        before_bytes = meter.peak_bytes()
        probe = self._prober(tokens)(rows)
        if probe.peak_bytes is None or before_bytes is None:
            return replace(probe, peak_bytes=None)
        return replace(probe, peak_bytes=probe.peak_bytes - before_bytes + _held_bytes(self._llm.model))

    def warm_up(self) -> None:
        """Run the shortest row, once: threads, libraries' buffers and what is imported at first use come with it."""
        if not self._is_warm:
            self._prober(int(self._lengths.min()))(1)
            self._is_warm = True

    @property
    def held_bytes(self) -> int:
        """Of weights and buffers."""
        return _held_bytes(self._llm.model)

    def probe_size(self, rows: int, tokens: int) -> Probe:
        """Try a shape. Its peak is as the device counts it: what PyTorch reserved, or this process's memory."""
        return self._prober(tokens)(rows)

    def run_shape(self, rows: int, tokens: int) -> None:
        """Run a shape that is known to fit. Its gradients stay, as within a step: see `leaving_no_trace`."""
        self._forward_backward(rows_of_shape(self._lengths, rows=rows, tokens=tokens))

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Around many shapes, so that no time goes into it between them."""
        with no_trace(self._llm.model):
            yield
        free_caches()

    def clock(self) -> float:
        """Seconds, once the device has done what was asked of it."""
        if self._llm.device.type == "cuda":
            torch.cuda.synchronize(self._llm.device)
        return time.perf_counter()

    def limit_bytes(self, budget: Budget) -> int | None:
        """What a peak may reach, as `probe_size` measures it: what there is, and no more than the budget."""
        there_bytes = self._prober(2).limit_bytes
        if there_bytes is None:
            return None
        if self._llm.device.type == "cuda":
            return min(there_bytes, budget.reserved_bytes)
        if isinstance(peak_meter(self._llm.device), AddressSpacePeak):
            return there_bytes  # addresses, of which a budget of resident bytes says nothing
        return min(there_bytes, budget.limit_bytes - budget.margin_bytes)

    def _prober(self, tokens: int, *, counts: Counts = "reserved") -> Prober:
        return Prober(
            lambda size: self._in_midst_of_step(rows_of_shape(self._lengths, rows=size, tokens=tokens)),
            model=self._llm.model,
            device=self._llm.device,
            num_steps=1,
            counts=counts,
        )

    def _in_midst_of_step(self, rows: NDArray[np.intp]) -> None:
        with ExitStack() as stack:
            stack.enter_context(gradients_at_hand(self._llm.model.parameters()))
            if self._state_bytes:
                stack.enter_context(standing_for(self._state_bytes, self._llm.device))
            self._forward_backward(rows)

    def _forward_backward(self, rows: NDArray[np.intp]) -> None:
        self._llm.model.train()
        self._pass(rows, max(int(self._num_supervised[rows].sum()), 1), step=0)


def counted_state_bytes(trainer: FinetuneTrainer, model: nn.Module) -> int:
    """Of the optimizer, in closed form: for a model that cannot be traced."""
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight.numel()]
    tensors = [
        Trained(rows=weight.shape[0] if weight.ndim else 1, columns=weight[:1].numel() if weight.ndim else 1, count=1)
        for weight in trained
    ]
    element_bytes = max((weight.element_size() for weight in trained), default=0)
    return optimizer_state(optimizer_of(trainer), tensors, element_bytes=element_bytes).num_bytes


def _held_bytes(model: nn.Module) -> int:
    """Of weights and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
