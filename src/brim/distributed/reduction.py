"""Add up the ranks' gradients, once a step, with the few numbers that travel with them.

Where weights are sharded, their gradients are added up as they come, and the numbers travel alone. Elsewhere gradients
are views into flat buckets, so that no second copy of them is made. A rank may have had no
micro-batch. A weight that no rank's loss reaches in a step has no gradient then, as in one process, so that its
optimizer leaves it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from brim.distributed.ranks import Ranks
from brim.errors import BrimError

MOST_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Say what a rank did in a step. Each number is exact in fp64."""

    num_rows: int = 0
    num_micro_batches: int = 0
    digest: int = 0  # of how the step was dealt, below 2**32: all ranks must have computed the same
    cap: int = 0  # of the cutter, after the step
    num_events: int = 0  # that are to be exchanged
    is_stopping: bool = False
    has_failed: bool = False
    peak_bytes: int = 0
    busy_s: float = 0.0

    @staticmethod
    def sent_bytes(ranks: int, *, num_parameters: int) -> int:
        """Return the bytes of the numbers that travel with the gradients, one of them for each weight."""
        return torch.float64.itemsize * (1 + ranks * len(_FIELDS) + num_parameters)


_FIELDS = tuple(field.name for field in fields(Share))


class GradientSum(Protocol):
    """Add up what the ranks computed in a step."""

    def clear(self) -> None:
        """Begin a sum: forget the gradients."""

    def run(self, losses: Tensor, share: Share) -> Tensor:
        """Add up gradients and numbers; return the numbers, a vector in fp64 on the device.

        losses: of this rank's micro-batches, their shares of the step's loss.
        """

    def read(self, numbers: Sequence[float]) -> tuple[float, list[Share]]:
        """Read the vector, once it is on the host: the step's loss, and what each rank did.

        Raises BrimError where the ranks did not compute the same plan.
        """


def gradient_sum(ranks: Ranks, parameters: Sequence[nn.Parameter], *, is_sharded: bool) -> GradientSum | None:
    """Return what adds the gradients of several processes up; None for a lone one."""
    if not ranks.are_several:
        return None
    return ShardedSum(ranks, parameters) if is_sharded else Reduction(ranks, parameters)


class Reduction:
    """Hold the buckets of these parameters' gradients, and add them up over the ranks.

    The sums are the same on all ranks, and for the same ranks to the bit those of any repetition.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
        self._ranks, self._parameters = ranks, parameters
        self._buckets: list[Tensor] = []
        self._views: list[Tensor] = []
        for bucket in _buckets(parameters):
            first = bucket[0]
            flat = torch.zeros(sum(each.numel() for each in bucket), dtype=first.dtype, device=first.device)
            self._buckets.append(flat)
            sizes = [each.numel() for each in bucket]
            # As `data`, each counts by itself how often it was changed; views share their bucket's count.
            parts = zip(torch.split(flat, sizes), bucket, strict=True)
            self._views += [view.view(each.shape).data for view, each in parts]
        self._versions: list[int] = []  # of the views, as the sum began

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self._buckets)

    def clear(self) -> None:
        """Begin a sum: every gradient is zero."""
        for bucket in self._buckets:
            bucket.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        self._versions = [view._version for view in self._views]

    def run(self, losses: Tensor, share: Share) -> Tensor:
        """Add up as GradientSum does; a rank that has failed adds nothing."""
        # Autograd adds to a gradient in place; hooks would tell the same, and cost time in each micro-batch.
        reached = [float(view._version > before) for view, before in zip(self._views, self._versions, strict=True)]
        vector = _vector(self._ranks, losses, share, reached, device=self._parameters[0].device)
        if share.has_failed:
            self.clear()  # a failed pass leaves parts of a gradient, or none
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                assert parameter.grad is None, "a gradient beside its bucket"
        for bucket in self._buckets:
            self._ranks.add(bucket)
        self._ranks.add(vector)
        return vector

    def read(self, numbers: Sequence[float]) -> tuple[float, list[Share]]:
        """Read as GradientSum does. Takes the gradients away of weights that no loss of this step has reached."""
        loss, shares, times_reached = _read(self._ranks, numbers)
        for parameter, times in zip(self._parameters, times_reached, strict=True):
            if not times:
                parameter.grad = None
        return loss, shares


class ShardedSum:
    """Leave the gradients to FSDP, which has added them up in each round; the numbers travel once a step."""

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
        self._ranks, self._parameters = ranks, parameters

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, losses: Tensor, share: Share) -> Tensor:
        vector = _vector(self._ranks, losses, share, [], device=self._parameters[0].device)
        self._ranks.add(vector)
        return vector

    def read(self, numbers: Sequence[float]) -> tuple[float, list[Share]]:
        loss, shares, _ = _read(self._ranks, numbers)
        return loss, shares


def _vector(ranks: Ranks, losses: Tensor, share: Share, others: list[float], *, device: torch.device) -> Tensor:
    """Return what this rank adds: its loss, its share in its own place, and other numbers."""
    numbers = [0.0] * (ranks.size * len(_FIELDS))
    start = ranks.rank * len(_FIELDS)
    numbers[start : start + len(_FIELDS)] = map(float, astuple(share))
    of_share = torch.tensor([*numbers, *others], dtype=torch.float64).to(device, non_blocking=True)
    return torch.cat([losses.double().sum()[None].to(device), of_share])


def _read(ranks: Ranks, numbers: Sequence[float]) -> tuple[float, list[Share], Sequence[float]]:
    """Return the loss, the shares and the other numbers of a vector that was added up."""
    loss, *rest = numbers
    width, size = len(_FIELDS), ranks.size
    shares = [_share(rest[rank * width : (rank + 1) * width]) for rank in range(size)]
    if len({share.digest for share in shares}) > 1:
        raise BrimError(
            what="the processes of this run have cut a step differently",
            expected="the same rows, configuration and versions of packages on every machine",
            fix="compare the packages of the machines (environment.json has those of the first)",
        )
    return loss, shares, rest[size * width :]


def _share(numbers: Sequence[float]) -> Share:
    kinds: dict[str, Callable[[float], Any]] = {"busy_s": float, "is_stopping": bool, "has_failed": bool}
    return Share(**{name: kinds.get(name, int)(number) for name, number in zip(_FIELDS, numbers, strict=True)})


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield neighbours of one dtype and device, together at most MOST_BUCKET_BYTES, or one by itself."""
    bucket: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        is_alike = not bucket or (parameter.dtype, parameter.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (is_alike and num_bytes + parameter.nbytes <= MOST_BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += parameter.nbytes
    if bucket:
        yield bucket
