"""Describe the GPU and the PyTorch that a step is traced for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTarget:
    """Describe what decides which kernel CUDA runs."""

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int] = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))  # type: ignore[assignment]
    multiprocessors: int | None = None  # None: attention is not split over the keys (decoding, very short batches)
    # The questions that a trace has asked of the device, as (function, arguments without the target), and the answers.
    answers: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sm(self) -> int:
        """Return the architecture's number, such as 80 for compute capability 8.0."""
        return 10 * self.compute_capability[0] + self.compute_capability[1]

    @property
    def facts(self) -> dict[str, Any]:
        """Return all that a trace depends on, for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def has_same_answers_on(self, other: CudaTarget) -> bool:
        """Return whether a trace for the other device would have been given the same answers throughout."""
        if replace(other, compute_capability=self.compute_capability) != self:
            return False
        return all(
            answer == function(*arguments, **dict(keywords), target=other)
            for (function, arguments, keywords), answer in self.answers.items()
        )


def record_answers(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Record each call and its answer in the target, the last argument; only such functions look at its capability."""

    @wraps(function)
    def ask(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Answer:
        answer = function(*arguments, **keywords)
        target: Any = keywords.get("target", arguments[-1] if arguments else None)
        others = tuple(each for each in arguments if each is not target)
        named = tuple((name, value) for name, value in keywords.items() if value is not target)
        target.answers[function, others, named] = answer
        return answer

    return ask
