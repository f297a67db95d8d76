"""What the benchmarks change or count inside brim while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any


class Padded:
    """Tokens that went through the model in the passes that counted, padding included."""

    def __init__(self) -> None:
        self.num_tokens = 0


@contextmanager
def counting_padded_tokens() -> Iterator[Padded]:
    """Within it, the padded tokens of every step are counted."""
    from brim.batching.step import GradientStep

    padded, run = Padded(), GradientStep.run

    def counted(self: GradientStep, *arguments: Any, **options: Any) -> Any:
        outcome = run(self, *arguments, **options)
        cuts = [part.micro_batch for part in outcome.parts]
        padded.num_tokens += sum(cut.num_rows * cut.padded_length for cut in cuts)
        return outcome

    GradientStep.run = counted  # type: ignore[method-assign]
    try:
        yield padded
    finally:
        GradientStep.run = run  # type: ignore[method-assign]


@contextmanager
def foretelling_wrongly(factor: float | None) -> Iterator[None]:
    """Within it, the memory that a micro-batch's shape adds is foretold as `factor` times what the model says.

    The plan and its probe have passed by then: nothing but running out of memory tells that the model is wrong.
    None: nothing is changed.
    """
    from brim.batching.by_length import ByLength

    make = ByLength.__init__

    def wrong(self: ByLength, *, costs: Any, **options: Any) -> None:
        scale = costs.scale if factor is None else costs.scale * factor
        make(self, costs=replace(costs, scale=scale), **options)

    ByLength.__init__ = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        ByLength.__init__ = make  # type: ignore[method-assign]
