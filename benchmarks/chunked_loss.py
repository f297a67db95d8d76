"""Measure what it costs and saves to compute the loss in chunks of positions, instead of with whole logits.

    python -m benchmarks.chunked_loss

Output layer and cross-entropy, forward and backward, on random hidden states; both ways alternate within one process.
Memory is what the resident set rises by (VmHWM, set back before each run), so Linux is needed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.report import print_table, write_report
from brim.models.loss import chunk_rows
from brim.models.loss.chunked import chunked_loss_sum

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold an output layer and its input."""

    vocabulary_size: int
    hidden_size: int
    num_positions: int
    head_trains: bool
    most_rows: int  # positions in a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Hold medians over the repetitions."""

    whole_ms: float
    time_ratio: float  # chunks over whole
    whole_bytes: int
    chunked_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    settings = parser.parse_args(arguments)
    num_threads = torch.get_num_threads()
    measured = [(case, measure(case, settings.repetitions)) for case in cases()]
    columns = ("vocabulary × hidden, positions", "head", "chunk", "whole ms", "time", "whole MiB", "chunks MiB")
    print_table("loss in chunks / with whole logits", columns, [_row(*each) for each in measured])
    figures = {"cases": [{**asdict(case), **asdict(found)} for case, found in measured]}
    print(write_report("chunked_loss", figures=figures, num_threads=num_threads))


def cases() -> list[Case]:
    """Return each layer at the chunk that brim takes; one of them at other chunks, too."""
    shapes = [(32_000, 256, 2048), (128_256, 128, 512)]
    found = [
        Case(
            vocabulary_size=vocabulary_size,
            hidden_size=hidden_size,
            num_positions=num_positions,
            head_trains=head_trains,
            most_rows=chunk_rows(vocabulary_size, head_trains=head_trains),
        )
        for vocabulary_size, hidden_size, num_positions in shapes
        for head_trains in (False, True)
    ]
    others = [
        Case(vocabulary_size=32_000, hidden_size=256, num_positions=2048, head_trains=head_trains, most_rows=most_rows)
        for most_rows in (64, 256)
        for head_trains in (False, True)
    ]
    return [*found, *others]


def measure(case: Case, repetitions: int) -> Figures:
    """Both ways in turn; the first turn warms up and is not counted."""
    torch.manual_seed(0)
    hidden = torch.randn(case.num_positions, case.hidden_size, requires_grad=True)
    weight = (torch.randn(case.vocabulary_size, case.hidden_size) * 0.02).requires_grad_(case.head_trains)
    targets = torch.randint(case.vocabulary_size, (case.num_positions,))

    def whole() -> Tensor:
        return cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")

    def chunked() -> Tensor:
        return chunked_loss_sum(hidden, weight, None, targets, most_rows=case.most_rows)

    turns = []
    for _ in range(1 + repetitions):
        turns.append([_run(way, [hidden, weight]) for way in (whole, chunked)])
    seconds, peaks = ([[turn[way][kind] for turn in turns[1:]] for way in (0, 1)] for kind in (0, 1))
    ratios = [ours / theirs for theirs, ours in zip(*seconds, strict=True)]
    return Figures(
        whole_ms=round(1000 * median(seconds[0]), 1),
        time_ratio=round(median(ratios), 3),
        whole_bytes=int(median(peaks[0])),
        chunked_bytes=int(median(peaks[1])),
    )


def _run(loss: Callable[[], Tensor], tensors: Sequence[Tensor]) -> tuple[float, int]:
    """Return seconds of a forward and backward pass, and the bytes that it added to the resident set at most."""
    for each in tensors:
        each.grad = None
    _CLEAR.write_text("5")  # VmHWM starts anew
    before = _resident_bytes("VmRSS")
    started = time.perf_counter()
    loss().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - started, _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, "Linux has it"
    return int(found[1]) * 1024


def _row(case: Case, found: Figures) -> list[str]:
    return [
        f"{case.vocabulary_size:,} × {case.hidden_size}, {case.num_positions:,}",
        "trained" if case.head_trains else "frozen",
        f"{case.most_rows:,}",
        f"{found.whole_ms:.1f}",
        f"{found.time_ratio:.3f}",
        f"{found.whole_bytes / 2**20:.0f}",
        f"{found.chunked_bytes / 2**20:.0f}",
    ]


if __name__ == "__main__":
    main()
