"""Compute the gradient of a job's effective batch: its rows through the model, in micro-batches.

Each micro-batch goes through the model forward and backward; the norm of its own gradient can be taken while the
gradients are summed. Where several processes train, each takes its share of the micro-batches, and their gradients are
added up once a step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from brim.batching import NUM_GROUPS, GradientStep, MicroBatch, NoiseMeasurement, Part, StepOutcome
from brim.batching.memory import OutOfMemory, attempt, random_states, restore_random_states
from brim.data.tokens import Batch, TokenRow, collate, pack
from brim.distributed import Claims, Share, deal, gradient_sum, local
from brim.models import LLM
from brim.models.packing import PackedRows, passing
from brim.train.job import TrainJob

OnEvent = Callable[[Mapping[str, Any]], None]


# Tokens, with padding, that become tensors before a step's first pass: between passes of the model that takes four
# times as long. Those of more are left for later, when a GPU that would wait for them is busy.
_TOKENS_AHEAD = 8192


class Gradient:
    """Sum gradients into the model's parameters; the optimizer is the loop's.

    on_event: called with each allocation that failed, with the keys of the rows, and with what followed.
    """

    def __init__(self, job: TrainJob, scaler: torch.amp.GradScaler, on_event: OnEvent) -> None:
        self.noise: NoiseMeasurement | None = None  # of the last sum; None: not measured, or there was nothing to say
        self._job = job
        self._scaler = scaler
        self._pass = MicroBatchPass(llm=job.llm, pad_id=job.pad_id, scaler=scaler)
        self._on_event = on_event
        self.parameters = [p for p in job.llm.model.parameters() if p.requires_grad]
        self.shares: Sequence[Share] = ()  # what each rank did in the last step that was read; none of a lone process
        self._reduction = gradient_sum(job.ranks, self.parameters, is_sharded=job.sharded is not None)
        self._cut: Sequence[MicroBatch] = ()  # this rank's, where there are several
        self._claims: Claims | None = None  # of this step, where who is free takes the next
        self._dummy: Sequence[TokenRow] = ()  # that the others of a round wait for, where there are no rows left
        self._norms: GradientNorms | None = None  # of this rank's groups, until the sum of all ranks is measured, too
        self._digest = 0  # of how the step was dealt
        self._indices: NDArray[np.intp] = np.zeros(0, dtype=np.intp)  # of the effective batch among the job's rows
        self._rows: Sequence[TokenRow] = ()  # of it
        # Of micro-batches that come, by the position of their first row in it.
        self._prepared: dict[int, tuple[Sequence[TokenRow], Batch]] = {}
        self._num_supervised = 0  # tokens of it
        self._number = 0  # of the step
        self._last = self._indices  # positions in the effective batch of the rows that went into the model last
        job.llm.model.train()  # whole: an adapter in training mode may stand around a base that is not
        # No module: language models keep no running averages, and a rotary embedding that grows with the longest row
        # seen keeps that length beside its buffer, which would be put back alone.
        self._step = GradientStep(
            cutter=job.cutter,
            parameters=self.parameters,
            backward=self._backward,
            on_event=self._hear,
            prepare=self._prepare,
            name_row=lambda position: f"row {int(job.rows.keys[self._indices[position]])} (numbered from 0)",
            drop=self.drop,
        )

    def sum(
        self, indices: NDArray[np.intp], num_supervised: int, *, step: int, measures_noise: bool = False
    ) -> StepOutcome:
        """Sum the gradient of the mean loss over the supervised tokens of these rows, positions among the job's.

        step: its number, which decides with a row's key what is dropped, where that is drawn by row. measures_noise:
        cut the batch into random groups of rows, and set `noise`.
        Raises OutOfMemoryError when a row alone runs out of memory; no gradient is left then.
        """
        self.noise, self._norms = None, None
        measures_noise = measures_noise and len(indices) > 1
        indices, cut = self._share_of(indices, num_groups=NUM_GROUPS if measures_noise else None)
        self._indices, self._num_supervised, self._number = indices, num_supervised, step
        self._rows = list(self._job.rows.take(indices))  # at once: between passes of the model each takes far longer
        if not self._job.llm.model.training:  # after an evaluation; it takes milliseconds where there are many layers
            self._job.llm.model.train()
        lengths = self._job.rows.lengths[indices]
        if not measures_noise:
            return self._step.run(lengths, first_cut=cut, more=self._claims or tuple)
        with GradientNorms(self.parameters) as norms:
            num_groups = NUM_GROUPS if cut is None else max(len(cut), 1)
            outcome = self._step.run(lengths, num_groups=num_groups, meter=norms, first_cut=cut)
        if self._reduction is None:
            self.noise = self._noise_of(self._squares_of(outcome.parts, norms), num_rows=len(indices))
        else:
            self._norms = norms
        return outcome

    def gathered(self, outcome: StepOutcome, share: Share) -> Tensor:
        """Add the gradient up over all ranks. Return the numbers for `read`, a vector on the device.

        share: what this rank says of itself beside how many rows it did.
        """
        if self._reduction is None:
            return outcome.losses
        sizes = [part.micro_batch.num_rows for part in outcome.parts if part.micro_batch.num_rows]
        share = replace(share, num_rows=sum(sizes), num_micro_batches=len(sizes), digest=self._digest)
        numbers = self._reduction.run(outcome.losses, share)
        if self._norms is not None:  # before anything is clipped
            self._norms.end_sum([p.grad for p in self.parameters if p.grad is not None])
        return numbers

    def read(self, numbers: Sequence[float]) -> float:
        """Return the step's loss, once the numbers are on the host; set `shares`."""
        if self._reduction is None:
            return math.fsum(numbers)
        loss, self.shares = self._reduction.read(numbers)
        return loss

    def keys_of(self, parts: Sequence[Part]) -> list[int]:
        """Return the keys of the rows of one or more parts, in order."""
        return sorted(int(key) for part in parts for key in self._job.rows.keys[self._rows_of(part)])

    def failed(self) -> tuple[MicroBatch, list[int]] | None:
        """Return the micro-batch that went into the model last, and its rows' keys; None: that was a dummy."""
        batch = next(batch for batch in self._cut if batch.rows is self._last)
        return (batch, [int(key) for key in self._job.rows.keys[self._indices[batch.rows]]]) if batch.num_rows else None

    def measure_noise(self, outcome: StepOutcome, *, num_rows: int) -> None:
        """Set `noise` where this step of several ranks is to be measured: each has the norms of its own groups.

        num_rows: of the step. The gradient is the sum over the ranks.
        """
        if self._norms is None or self._reduction is None:
            return
        norms, self._norms = self._norms, None
        found = self._job.ranks.exchanged("noise", lambda: self._squares_of(outcome.parts, norms))
        squares = [square for of_rank in found for square in of_rank[0][:-1]]
        weights = [weight for of_rank in found for weight in of_rank[1]]
        self.noise = self._noise_of(([*squares, found[0][0][-1]], weights), num_rows=num_rows)

    def at_fault(self, outcome: StepOutcome, loss: float) -> list[int]:
        """Find the micro-batches whose loss is not finite; else those whose gradient is not, each replayed by itself.

        loss: of the step, of all ranks. All of them, where the replay runs out of memory, and where each gradient of a
        lone process is finite, so that it is their sum that is not.
        The losses were kept on the device, so that a step that is well is not held up by looking at each.
        """
        parts = outcome.parts
        by_loss = [number for number, part in enumerate(parts) if not math.isfinite(part.loss.item())]
        if by_loss or not math.isfinite(loss):
            return by_loss
        random_after = random_states()
        restore_random_states(outcome.random_before)  # the same dropout
        try:
            found = attempt(lambda: [number for number, part in enumerate(parts) if not self._is_finite(part)])
            if isinstance(found, OutOfMemory) or not (found or self._job.ranks.are_several):
                return list(range(len(parts)))
            return found
        finally:
            self.drop()
            restore_random_states(random_after)

    def drop(self) -> None:
        """Forget the gradient."""
        if self._reduction is not None:
            self._reduction.clear()
            return
        for parameter in self.parameters:
            parameter.grad = None

    def _share_of(
        self, indices: NDArray[np.intp], *, num_groups: int | None
    ) -> tuple[NDArray[np.intp], list[MicroBatch] | None]:
        """Return this rank's rows of an effective batch, and how they are cut; a lone process cuts them itself.

        Where micro-batches are claimed, all rows may become this rank's; `_claims` says which do.
        """
        self._claims = None
        if self._reduction is None:
            return indices, None
        ranks, lengths = self._job.ranks, self._job.rows.lengths[indices]
        is_sharded = self._job.sharded is not None
        if self._job.claims and num_groups is None:
            self._claims = Claims(self._job.cutter, lengths, ranks, self._job.llm.device)
            self._digest = zlib.crc32(_listed(self._claims.micro_batches).tobytes())
            return indices, []
        dealt = deal(self._job.cutter, lengths, ranks=ranks.size, num_groups=num_groups, in_lockstep=is_sharded)
        self._digest = zlib.crc32(np.concatenate([_listed(of_rank) for of_rank in dealt]).tobytes())
        mine, start = dealt[ranks.rank], 0
        cut = []
        for batch in mine:
            cut.append(replace(batch, rows=np.arange(start, start + batch.num_rows)))
            start += batch.num_rows
        if self._job.sharded is not None:
            dummy = MicroBatch(rows=np.zeros(0, dtype=np.intp), padded_length=_DUMMY_TOKENS)
            cut += [dummy] * (max(map(len, dealt)) - len(cut))
            self._dummy = [_dummy_of(self._job.rows[int(indices[0])])]
        self._cut, own = cut, [batch.rows for batch in mine]
        return indices[np.concatenate(own)] if own else indices[:0], cut

    def _squares_of(self, parts: Sequence[Part], norms: GradientNorms) -> tuple[list[float], list[int]]:
        """Return the squared norm of each group's gradient, last that of their sum; and the groups' weights."""
        scale = self._scaler.get_scale()  # of the loss; 1.0 where it is not scaled
        weights = [int(self._job.rows.num_supervised[self._rows_of(part)].sum()) for part in parts]
        return [squared / scale**2 for squared in norms.squared()], weights

    @staticmethod
    def _noise_of(found: tuple[list[float], list[int]], *, num_rows: int) -> NoiseMeasurement | None:
        (*of_groups, of_sum), weights = found
        return NoiseMeasurement.of(squared_sum=of_sum, squared_shares=of_groups, weights=weights, num_rows=num_rows)

    def _rows_of(self, part: Part) -> NDArray[np.intp]:
        """Return positions among the job's rows."""
        return self._indices[part.micro_batch.rows]

    def _is_finite(self, part: Part) -> bool:
        """Replay a part; where weights are sharded, it is the sum over its round that is looked at, by all ranks."""
        self.drop()
        self._backward(part.micro_batch.rows)
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if self._job.sharded is None:
            return is_finite
        num_not_finite = torch.tensor(float(not is_finite), device=self._job.llm.device)
        self._job.ranks.add(num_not_finite)
        return not num_not_finite.item()

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Make the tensors of the first micro-batches."""
        self._prepared, num_tokens = {}, 0
        for each in micro_batches if self._job.sharded is None else ():
            lengths = self._job.rows.lengths[self._indices[each.rows]]
            num_tokens += int(len(lengths) * lengths.max() if self._job.llm.packed is None else lengths.sum())
            if num_tokens > _TOKENS_AHEAD:
                return
            self._last = each.rows
            rows = self._at(each.rows)
            self._prepared[int(each.rows[0])] = rows, self._pass.batch_of(rows)

    def _at(self, positions: NDArray[np.intp]) -> list[TokenRow]:
        return [self._rows[position] for position in positions.tolist()]

    def _backward(self, positions: NDArray[np.intp]) -> Tensor:
        """Add the gradient of one micro-batch; return its part of the batch's mean loss, a scalar."""
        self._last = positions
        if self._job.sharded is not None:
            with self._job.sharded.in_step():
                own = self._at(positions)
                return self._pass(own or self._dummy, self._num_supervised, step=self._number, counts=bool(own))
        rows, batch = self._prepared.pop(int(positions[0]), None) or (self._at(positions), None)
        return self._pass(rows, self._num_supervised, step=self._number, batch=batch)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "oom":
            event = {**event, "rows": [int(key) for key in self._job.rows.keys[self._indices[self._last]]]}
        self._on_event(event)


def _listed(micro_batches: Sequence[MicroBatch]) -> NDArray[np.int64]:
    """Write the rows of micro-batches behind one another, each with its count in front."""
    parts = [np.concatenate([[batch.num_rows], batch.rows]) for batch in micro_batches]
    return np.concatenate([[len(parts)], *parts]).astype(np.int64)


_DUMMY_TOKENS = 2


def _dummy_of(row: TokenRow) -> TokenRow:
    """Return a row's first tokens, which no later one changes: where they are not finite, the row is not, either."""
    return replace(row, input_ids=row.input_ids[:_DUMMY_TOKENS], supervised=np.arange(_DUMMY_TOKENS) > 0)


# Sums in fp32 over so many numbers are right to 1e-6 on a CPU, too, which adds them up one after the other: the norm of
# 50 million at once came out 0.4% too small.
_BLOCK = 1024


class GradientNorms:
    """Measure groups (batching's GroupMeter) while it is entered.

    As soon as autograd has a parameter's gradient, its norm is taken and it is added to a sum kept here, so that no
    more than one parameter's gradient stands beside the sums: a step takes the memory that it takes otherwise. The sums
    are added up as autograd does it, and equal its own to the bit. What autograd hands over in several pieces within
    one backward pass (a weight in two reentrant checkpoints) would be measured piece by piece, which is refused.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[int, Tensor] = {}  # by the parameter's position
        self._norms: dict[int, Tensor] = {}  # of the micro-batch that is being made
        self._groups: list[Tensor] = []  # each micro-batch's norms by parameter, on the device; last those of the sums
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> GradientNorms:
        for number, parameter in enumerate(self._parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(self._take, number))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._sums, self._norms = {}, {}

    def drop(self) -> None:
        """Forget what was measured: the step begins again."""
        self._sums, self._norms, self._groups = {}, {}, []

    def end_group(self) -> None:
        """Keep the norms of the micro-batch that has ended."""
        self._groups.append(self._stacked(self._norms.values()))
        self._norms = {}

    def end(self) -> None:
        """Measure the sums, and hand them to the parameters as their gradient."""
        self._groups.append(self._stacked(_norm(total) for total in self._sums.values()))
        for number, total in self._sums.items():
            self._parameters[number].grad = total
        self._sums = {}

    def squared(self) -> list[float]:
        """Return the squared norm of each micro-batch's gradient, last that of their sum; one wait for the device."""
        norms = iter(torch.cat(self._groups).tolist())
        return [math.fsum(next(norms) ** 2 for _ in range(len(group))) for group in self._groups]

    def end_sum(self, gradients: Iterable[Tensor]) -> None:
        """Measure another sum in place of that of the groups."""
        self._groups[-1] = self._stacked(_norm(gradient) for gradient in gradients)

    def _take(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "autograd has just put it there"
        assert number not in self._norms, "a parameter whose gradient comes in pieces"
        parameter.grad = None
        self._norms[number] = _norm(gradient)
        if number in self._sums:
            self._sums[number] += gradient
        else:
            self._sums[number] = gradient

    def _stacked(self, norms: Iterable[Tensor]) -> Tensor:
        """Join scalars to a vector, which is empty where no parameter had a part."""
        scalars = list(norms)
        return torch.stack(scalars) if scalars else torch.zeros(0, device=self._parameters[0].device)


def _norm(gradient: Tensor) -> Tensor:
    """Return the norm, a scalar in fp32."""
    flat = gradient.flatten()
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([blocks, rest[None]]))
    return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPass:
    """Run some rows forward and backward; gradients are added to those that the weights have."""

    llm: LLM
    pad_id: int
    scaler: torch.amp.GradScaler  # of the loss, where arithmetic is fp16; not enabled elsewhere

    def __call__(
        self,
        rows: Sequence[TokenRow],
        num_supervised: int,
        *,
        step: int,
        batch: Batch | None = None,
        counts: bool = True,
    ) -> Tensor:
        """Add the rows' gradient; return their part of the mean loss over `num_supervised` tokens, on the device.

        num_supervised: supervised tokens of the whole effective batch. step: its number, for the dropout. batch: what
        `batch_of` gave, where the rows are tensors already. counts: False: the loss and what it gives the gradient are
        0, whatever it is; NaN times 0 would not be.
        """
        llm = self.llm
        batch = (self.batch_of(rows) if batch is None else batch).to(llm.device)
        with self._dropout_of(rows, batch.packed, step), passing(llm.packed, batch.packed):
            # Copies of sharded weights in lower precision would be whole.
            with llm.precision.autocast(llm.device, keeps_copies=llm.gathers is None):
                scale = self._gradient_scale(num_supervised)
                loss = llm.run(lambda: llm.objective.loss(llm.model, batch, gradient_scale=scale))
                loss = loss / num_supervised
            if not counts:
                loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def batch_of(self, rows: Sequence[TokenRow]) -> Batch:
        """Return the rows as tensors of the host, padded or packed."""
        return (collate if self.llm.packed is None else pack)(rows, pad_id=self.pad_id)

    def _dropout_of(
        self, rows: Sequence[TokenRow], packed: PackedRows | None, step: int
    ) -> AbstractContextManager[None]:
        """Return the dropout of these rows, for the backward pass, too: recomputed activations want the same masks."""
        if self.llm.row_dropout is None:
            return nullcontext()
        lengths = [len(row.input_ids) for row in rows]
        return self.llm.row_dropout.of_rows([row.key for row in rows], lengths, step=step, packed=packed)

    def _gradient_scale(self, num_supervised: int) -> Tensor | None:
        """Return what the backward pass multiplies the loss sum's gradient by, where fp16 needs it beforehand."""
        if not self.scaler.is_enabled():
            return None
        return self.scaler.scale(torch.ones((), device=self.llm.device)) / num_supervised
