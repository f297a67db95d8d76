"""Sum the gradient of one effective batch in micro-batches, and replay it in smaller ones after an OOM.

A replay also puts back what a forward pass changes in a module besides its gradients: its buffers, such as
BatchNorm's running averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from brim.batching.memory import OutOfMemory, attempt, free_caches, random_states, restore_random_states
from brim.batching.microbatch import CapChange, Cutter, MicroBatch
from brim.errors import BrimError, OutOfMemoryError
from brim.units import format_count

T = TypeVar("T")


Backward: TypeAlias = Callable[[NDArray[np.intp]], Tensor]


OnEvent: TypeAlias = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Hold a micro-batch that went well."""

    micro_batch: MicroBatch
    loss: Tensor  # its share of the step's loss, a scalar, on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Describe a step whose gradient is ready. Each row counts once, whatever was tried before."""

    losses: Tensor  # each micro-batch's share, on the device
    parts: tuple[Part, ...]
    num_out_of_memory: int  # times that the step was begun again
    random_before: Mapping[str, Tensor]  # the random states in which it began

    @classmethod
    def nothing(cls, device: torch.device) -> StepOutcome:
        """Return the outcome of a step of no rows."""
        return cls(losses=torch.zeros(0, device=device), parts=(), num_out_of_memory=0, random_before=random_states())

    @property
    def loss(self) -> float:
        """Wait for the device; return the loss, which its shares are added up to exactly.

        Those of a thousand micro-batches, added in fp32 one by one, would be off by 1e-5.
        """
        return math.fsum(self.losses.tolist())


def run_batches(
    order: NDArray[np.intp],
    *,
    divide: Callable[[NDArray[np.intp]], Iterable[MicroBatch]],
    work: Callable[[MicroBatch], T],
    done: Callable[[MicroBatch, T], object] = lambda batch, result: None,
    shrink: Callable[[MicroBatch], bool],
    too_large: Callable[[MicroBatch], BrimError],
) -> None:
    """Run all positions in batches; a batch that runs out of memory, and what follows it, is divided again.

    divide: gives batches of the positions that are left, along their order, one at a time.
    work: may be called again with positions of a call that failed. done: is called with the result of each batch that
    went well; what it raises ends the run. shrink: lowers the limit by which batches are divided; False: the batch
    cannot be divided further. It is tried once more, and then `too_large` is raised.
    """
    while len(order):
        for batch in divide(order):
            result = attempt(partial(work, batch))
            if isinstance(result, OutOfMemory):
                free_caches()
                if shrink(batch):
                    break
                result = attempt(partial(work, batch), is_last=lambda: True)
                if isinstance(result, OutOfMemory):
                    free_caches()
                    raise too_large(batch)
            done(batch, result)
            order = order[batch.num_rows :]


class GroupMeter(Protocol):
    """Look at the gradient of each micro-batch by itself, and gather their sum in place of autograd."""

    def drop(self) -> None:
        """Forget all that has been gathered: the step begins, or begins again."""

    def end_group(self) -> None:
        """Take note that a micro-batch's backward pass is over."""

    def end(self) -> None:
        """Make the sums the parameters' gradients, after the last micro-batch."""


class GradientStep:
    """Sum the gradients of an effective batch's micro-batches.

    backward: does the forward and backward pass of the rows at these positions of the effective batch, and returns
    their share of the step's loss, detached. It divides by the weight of the whole step, so that the shares add up.
    parameters: whose gradients are dropped before a step begins, and before it begins again. The optimizer is the
    caller's, to be stepped once after each run.
    module: whose buffers are put back when a step begins again; None where a forward pass changes none.
    on_event: is called for every failure, for how the step goes on, and for every change of the cutter's cap.
    prepare: is called with the micro-batches that come, before the first of their passes.
    name_row: returns what to call the row at a position, where one does not fit by itself.
    tells_lengths: whether the lengths are tokens, to be named in events and errors.
    drop: drops the gradients in another way than by forgetting them; None: they are forgotten.
    """

    def __init__(
        self,
        *,
        cutter: Cutter,
        parameters: Sequence[nn.Parameter],
        backward: Backward,
        on_event: OnEvent,
        prepare: Callable[[Sequence[MicroBatch]], None] = lambda micro_batches: None,
        module: nn.Module | None = None,
        name_row: Callable[[int], str] = "row {} of the batch".format,
        tells_lengths: bool = True,
        drop: Callable[[], None] | None = None,
    ) -> None:
        self._cutter = cutter
        self._parameters = parameters
        self._backward = backward
        self._on_event = on_event
        self._prepare = prepare
        self._buffers = None if module is None else BufferKeeper(module)
        self._name_row = name_row
        self._tells_lengths = tells_lengths
        self._drop = drop

    def run(
        self,
        lengths: ArrayLike,
        *,
        num_groups: int | None = None,
        meter: GroupMeter | None = None,
        first_cut: Sequence[MicroBatch] | None = None,
        more: Callable[[], Sequence[MicroBatch]] = tuple,
    ) -> StepOutcome:
        """Sum the gradient of the rows of these lengths, in tokens; return the loss, too.

        num_groups: divide the batch in its own order, into about so many micro-batches; None: as is cheapest. meter:
        looks at the micro-batches, and begins again with the step. first_cut: how the rows are divided, unless memory
        runs out; None: as the cutter does it. more: asked, whenever all have been through the model, which of the rows
        come next; none: it was the last.

        After an allocation that failed, the gradients are dropped, random states and buffers rewound, caches freed,
        and the same rows partitioned smaller. A row that is alone already is tried once more; then OutOfMemoryError
        names it, with gradients dropped, and random states and buffers as they were before the step.
        Any other exception passes through, with the gradients as they were when it was raised.
        """
        random_before = random_states()
        if self._buffers is not None:
            self._buffers.save()
        num_out_of_memory = 0
        tried_alone: set[int] = set()  # first rows of micro-batches that failed and cannot be divided further
        parts: list[Part] = []
        micro_batches = self._cut(lengths, num_groups) if first_cut is None else list(first_cut)
        while isinstance(losses := self._pass(micro_batches, more, meter, parts, tried_alone), OutOfMemory):
            num_out_of_memory += 1
            number = len(parts)
            parts.clear()
            self._rewind(random_before, meter)
            self._cut_smaller(micro_batches, number, losses, tried_alone)
            rows = np.sort(np.concatenate([each.rows for each in micro_batches]))
            again = self._cut(np.asarray(lengths)[rows], num_groups)
            micro_batches = [replace(each, rows=rows[each.rows]) for each in again]
            self._on_event({"event": "replay", "num_micro_batches": len(micro_batches)})
        if self._buffers is not None:
            self._buffers.done()
        if not num_out_of_memory:
            self._say(self._cutter.clean_step())
        return StepOutcome(
            losses=losses, parts=tuple(parts), num_out_of_memory=num_out_of_memory, random_before=random_before
        )

    def _cut(self, lengths: ArrayLike, num_groups: int | None) -> list[MicroBatch]:
        if num_groups is None:
            return self._cutter.cut(lengths)
        return self._cutter.cut_in_order(lengths, num_groups=num_groups)

    def _pass(
        self,
        micro_batches: list[MicroBatch],
        more: Callable[[], Sequence[MicroBatch]],
        meter: GroupMeter | None,
        parts: list[Part],
        tried_alone: set[int],
    ) -> Tensor | OutOfMemory:
        """Return the shares of the loss, with all micro-batches among the parts; or why it failed, with those before.

        micro_batches: to which those that come are added.
        tried_alone: first rows of micro-batches that failed before and cannot be divided further.
        """
        self._drop_gradients(meter)

        def accumulate() -> Tensor:
            self._prepare(micro_batches)
            for micro_batch in _until_none_comes(micro_batches, more):
                loss = self._backward(micro_batch.rows)
                if meter is not None:
                    meter.end_group()
                parts.append(Part(micro_batch=micro_batch, loss=loss))
            if meter is not None:
                meter.end()
            # One wait for the device in a step, not one a micro-batch, and whoever reads them waits.
            losses = [part.loss for part in parts]
            return torch.stack(losses) if losses else torch.zeros(0, device=self._parameters[0].device)

        return attempt(accumulate, is_last=lambda: int(_failed(micro_batches, len(parts)).rows[0]) in tried_alone)

    def _rewind(self, random_before: Mapping[str, Tensor], meter: GroupMeter | None) -> None:
        self._drop_gradients(meter)
        restore_random_states(random_before)
        if self._buffers is not None:
            self._buffers.restore()
        free_caches()

    def _cut_smaller(
        self, micro_batches: Sequence[MicroBatch], number: int, failure: OutOfMemory, tried_alone: set[int]
    ) -> None:
        """Lower the cap; where the failed row is alone already, let it be tried once more."""
        failed = _failed(micro_batches, number)
        event = {
            "event": "oom",
            "micro_batch": number + 1,
            "num_micro_batches": len(micro_batches),
            "rows": failed.num_rows,
            "where": failure.where,
            "message": failure.message,
        }
        if self._tells_lengths:
            event |= {"padded_length": failed.padded_length, "predicted_bytes": failed.peak_bytes}
        self._on_event(event)
        change = self._cutter.lower(failed)
        self._say(change)
        if change is not None:
            return
        first = int(failed.rows[0])
        if first in tried_alone:
            raise self._no_way(failed, failure)
        tried_alone.add(first)

    def _no_way(self, failed: MicroBatch, failure: OutOfMemory) -> OutOfMemoryError:
        rows = self._name_row(int(failed.rows[0]))
        if failed.num_rows > 1:
            rows += f" and {failed.num_rows - 1} more, which cannot be cut further,"
        if self._tells_lengths:
            rows += f" ({format_count(failed.padded_length, 'token')})"
        return OutOfMemoryError(
            what=f"{rows} ran out of memory twice in the {failure.where} pass,"
            f" with nothing beside it: {failure.message}",
            fix="a shorter row, activation checkpointing, a loss in chunks, or weights in fewer bits",
        )

    def _say(self, change: CapChange | None) -> None:
        if change is not None:
            self._on_event({"event": "cap", "before": change.before, "after": change.after, "unit": change.unit})

    def _drop_gradients(self, meter: GroupMeter | None) -> None:
        if meter is not None:
            meter.drop()
        if self._drop is not None:
            self._drop()
            return
        for parameter in self._parameters:
            parameter.grad = None


def _until_none_comes(
    micro_batches: list[MicroBatch], more: Callable[[], Sequence[MicroBatch]]
) -> Iterator[MicroBatch]:
    """Yield the micro-batches, and those that come, which are added to them before any of them is yielded."""
    yield from micro_batches
    while coming := more():
        micro_batches += coming
        yield from coming


def _failed(micro_batches: Sequence[MicroBatch], number: int) -> MicroBatch:
    """Return the micro-batch of this number; the last one where it was the sum of their losses that failed."""
    return micro_batches[min(number, len(micro_batches) - 1)]


@dataclass(frozen=True, slots=True)
class _Key:
    owner: nn.Module
    name: str
    training: bool  # BatchNorm's averages move in training alone


class BufferKeeper:
    """Put buffers back to where they were when a step began: those that are saved with the module.

    The others are caches, such as a rotary embedding's that grows with the longest row, and what they hold goes with
    attributes that nobody puts back. Quantised weights can be buffers of many GiB: so a buffer's first copy lies in
    the host's memory, and later steps copy those alone whose values the first has changed. Tensors' version counters
    will not do: BatchNorm changes its averages behind their back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changes: dict[_Key, bool] = {}  # of the buffers that a step has been seen with
        self._buffers: dict[_Key, Tensor] = {}
        self._copies: dict[_Key, Tensor] = {}

    def save(self) -> None:
        """Copy the buffers, as a step begins."""
        self._buffers = {
            _Key(owner, name, owner.training): buffer
            for owner in self._module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if name not in owner._non_persistent_buffers_set
        }
        self._copies = {}
        for key, buffer in self._buffers.items():
            if key not in self._changes:
                self._copies[key] = buffer.detach().to("cpu", copy=True)
            elif self._changes[key]:
                self._copies[key] = buffer.detach().clone()

    def restore(self) -> None:
        """Put the buffers back, as the step begins once more."""
        for key, buffer in self._buffers.items():
            if key.owner._buffers[key.name] is not buffer:
                key.owner._buffers[key.name] = buffer
        with torch.no_grad():
            for key, copy in self._copies.items():
                self._buffers[key].copy_(copy)

    def done(self) -> None:
        """Drop the copies after a step that went well."""
        for key in self._copies.keys() - self._changes.keys():
            now = key.owner._buffers[key.name]
            self._changes[key] = now is None or not torch.equal(now.detach().cpu(), self._copies[key])
        self._buffers, self._copies = {}, {}
