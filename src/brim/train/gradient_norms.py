"""The norm of each micro-batch's own gradient, taken while the gradients are summed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Sums in fp32 over so many numbers are right to 1e-6 on a CPU, too, which adds them up one after the other: the norm of
# 50 million at once came out 0.4% too small.
_BLOCK = 1024


class GradientNorms:
    """A GroupMeter (batching/step.py), in effect while it is entered.

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
        """See GroupMeter."""
        self._sums, self._norms, self._groups = {}, {}, []

    def end_group(self) -> None:
        """See GroupMeter."""
        self._groups.append(self._stacked(self._norms.values()))
        self._norms = {}

    def end(self) -> None:
        """See GroupMeter."""
        self._groups.append(self._stacked(_norm(total) for total in self._sums.values()))
        for number, total in self._sums.items():
            self._parameters[number].grad = total
        self._sums = {}

    def squared(self) -> list[float]:
        """The squared norm of each micro-batch's gradient, and last that of their sum; one wait for the device."""
        norms = iter(torch.cat(self._groups).tolist())
        return [math.fsum(next(norms) ** 2 for _ in range(len(group))) for group in self._groups]

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
        """Scalars as one vector, which is empty where no parameter had a part."""
        scalars = list(norms)
        return torch.stack(scalars) if scalars else torch.zeros(0, device=self._parameters[0].device)


def _norm(gradient: Tensor) -> Tensor:
    """A scalar in fp32."""
    flat = gradient.flatten()
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([blocks, rest[None]]))
    return norm
