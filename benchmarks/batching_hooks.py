"""Change or count inside brim what the benchmarks need while it trains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray


class Padded:
    """Count the tokens that went through the model in the passes that counted, padding included."""

    def __init__(self) -> None:
        self.num_tokens = 0


@contextmanager
def counting_padded_tokens() -> Iterator[Padded]:
    """Within it, the padded tokens of every step are counted; of packed rows, those that fill a micro-batch up."""
    from brim.batching import MULTIPLE, GradientStep

    padded, run = Padded(), GradientStep.run

    def counted(self: GradientStep, lengths: NDArray[np.integer[Any]], **options: Any) -> Any:
        outcome = run(self, lengths, **options)
        cuts = [part.micro_batch for part in outcome.parts]
        if self._cutter.kind == "packed":
            padded.num_tokens += sum(-(-int(lengths[cut.rows].sum()) // MULTIPLE) * MULTIPLE for cut in cuts)
        else:
            padded.num_tokens += sum(cut.num_rows * cut.padded_length for cut in cuts)
        return outcome

    with patch.object(GradientStep, "run", counted):
        yield padded


class AddressSpace:
    """Note what the process has mapped when its budget is worked out; 0 before that."""

    def __init__(self) -> None:
        self.mapped_bytes = 0


@contextmanager
def noting_address_space() -> Iterator[AddressSpace]:
    """Within it, the size of the process is noted when a run's budget is worked out."""
    from brim.memory.devices import budget_of

    noted = AddressSpace()

    def noting(*arguments: Any, **options: Any) -> Any:
        noted.mapped_bytes = process_bytes("VmSize")
        return budget_of(*arguments, **options)

    with patch("brim.planning.request.budget_of", noting):
        yield noted


def process_bytes(key: str) -> int:
    """Return what Linux counts of this process: VmSize, VmPeak, VmRSS, …; 0 where it does not."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


@contextmanager
def foretelling_wrongly(factor: float | None) -> Iterator[None]:
    """Predict, meanwhile, that a micro-batch's shape adds `factor` times the memory that the model says.

    The plan and its probe have passed by then: nothing but running out of memory tells that the model is wrong.
    None: nothing is changed.
    """
    from brim.batching import ByLength

    make = ByLength.__init__

    def wrong(self: ByLength, *, costs: Any, **options: Any) -> None:
        scale = costs.scale if factor is None else costs.scale * factor
        make(self, costs=replace(costs, scale=scale), **options)

    with patch.object(ByLength, "__init__", wrong):
        yield
