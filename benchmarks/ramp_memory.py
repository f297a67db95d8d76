"""Measure peak memory across the phases of a ramp from 8 to 512 rows an update, under a budget of a few rows.

    python -m benchmarks.ramp_memory

A small Llama with LoRA, docstrings and code at their real lengths, on a CPU. The budget leaves room for four of the
longest rows, and the largest micro-batches that fit are asked for: the fastest ones of a small batch may take less, and
never more. Measured is the most of the process that is resident during each step; the first step of each phase is left
out. What tensors take is that, less what was resident before the model was loaded, after a run of two steps: a stricter
figure, since the libraries are the same in every phase.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import print_table, write_report
from benchmarks.subject import Shape, configuration, lora, make_base, make_rows
from brim.batching.memory import free_caches
from brim.batching.memory.meters import ResidentPeak
from brim.memory.devices import PACKING_BYTES
from brim.memory.devices.budget import resident_bytes
from brim.train import Record
from brim.units import format_bytes
from brim.workflows.measure.run import RETURNED_AT_ONCE

GOAL = 0.05
SMALLEST, LARGEST = 8, 512
ROWS_AT_ONCE = 4  # of the longest, that the budget leaves room for
NUM_ROWS = 2048
STAGE_SAMPLES = 512  # of each of the six stages before the final batch, which then has two steps
SHAPE = Shape(  # wide and shallow: its tensors are mapped one by one, so that what is resident is what lives
    hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
)
_MAX_CHARACTERS = 900
_FOUND = "found.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Hold the steps of one size, after the first of them."""

    effective_batch_size: int
    num_steps: int
    most_micro_batches: int
    peak_bytes: int  # resident, of the step that took the most
    tensor_bytes: int  # of it beyond what was resident before the model was loaded


class StepPeaks:
    """Observe what was resident at most in each step, and forget it."""

    def __init__(self) -> None:
        self._meter = ResidentPeak()
        self.steps: list[tuple[int, int, int]] = []  # size, micro-batches, bytes

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._meter.begin()

    def write(self, record: Record) -> None:
        if record.get("split") == "train":
            size, parts = int(record["effective_batch_size"]), int(record["num_micro_batches"])
            self.steps.append((size, parts, self._meter.peak_bytes()))
            self._meter.begin()

    def close(self) -> None: ...


def by_phase(steps: Sequence[tuple[int, int, int]], *, beside_bytes: int) -> list[PhasePeak]:
    """steps: size, micro-batches and bytes of each, in order. A phase of one step has none that is not its first."""
    phases = []
    for size, group in groupby(steps, key=lambda step: step[0]):
        after_first = list(group)[1:]
        if after_first:
            peak_bytes = max(step[2] for step in after_first)
            phases.append(
                PhasePeak(
                    effective_batch_size=size,
                    num_steps=len(after_first),
                    most_micro_batches=max(step[1] for step in after_first),
                    peak_bytes=peak_bytes,
                    tensor_bytes=peak_bytes - beside_bytes,
                )
            )
    return phases


def spread(values: Sequence[int]) -> float:
    """Return by how much the largest exceeds the smallest."""
    return max(values) / min(values) - 1


def settings(base: Path, *, stage_samples: int, budget: str = "auto") -> dict[str, Any]:
    """Return the configuration of one ramp, then two steps of the final batch."""
    trainer = {
        "effective_batch_size": LARGEST,
        "batch_rampup": {"length": f"{6 * stage_samples}sp", "from": SMALLEST},
        "train_samples": 6 * stage_samples + 2 * LARGEST,
        "use_maximum_batch_size": True,
        "enable_gradient_checkpointing": False,
        "chunked_loss": True,
        "learning_rate": 0.001,
        "steps_per_checkpoint": 1_000_000,
    }
    return {**configuration(base, adapter=lora(), trainer=trainer), "memory": {"budget": budget, "margin": 0}}


def measured(folder: Path, *, stage_samples: int) -> dict[str, Any]:
    """Measure in a process whose freed memory goes back to the system."""
    import brim

    rows, base = folder / "rows.jsonl", folder / "base"
    free = brim.plan(settings(base, stage_samples=stage_samples), rows, device="cpu")
    assert free.costs is not None, "a small model fits"
    room_bytes = math.ceil(free.costs.peak_bytes(ROWS_AT_ONCE, free.lengths.longest))
    _warm_up(settings(base, stage_samples=stage_samples), rows, folder / "warm-up")
    beside_bytes = resident_bytes() or 0
    config = settings(base, stage_samples=stage_samples, budget=f"{beside_bytes + PACKING_BYTES + room_bytes} B")
    peaks = StepPeaks()
    brim.Model(config).train(rows, output_directory=folder / "run", observer=peaks)
    plan = json.loads((folder / "run" / "plan.json").read_text())["plan"]
    return {
        "longest_tokens": free.lengths.longest,
        "beside_bytes": beside_bytes,
        "cap_bytes": plan["chosen"]["cap_bytes"],
        "cap_binds": plan["chosen"]["cap_binds"],
        "predicted_bytes": {str(each["size"]): each["total_bytes"] for each in plan["phases"]},
        "phases": [asdict(phase) for phase in by_phase(peaks.steps, beside_bytes=beside_bytes)],
    }


def _warm_up(config: dict[str, Any], rows: Path, output: Path) -> None:
    """Run two steps, so that what comes into a process with its first run is there: code, threads, buffers."""
    import brim

    trainer = {**config["trainer"], "effective_batch_size": SMALLEST, "batch_rampup": None, "train_steps": 2}
    del trainer["train_samples"]
    brim.Model({**config, "trainer": trainer}).train(rows, output_directory=output)
    free_caches()


def in_its_own_process(folder: Path, *, stage_samples: int) -> dict[str, Any]:
    """Run `measured` where every tensor goes back to the system as soon as it is freed."""
    command = [sys.executable, "-m", "benchmarks.ramp_memory", "--in", str(folder), "--stage", str(stage_samples)]
    environment = {**os.environ, **RETURNED_AT_ONCE, "BRIM_CACHE_DIR": str(folder / "cache")}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / _FOUND).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=STAGE_SAMPLES, help="samples of each stage of the ramp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.folder is not None:
        (given.folder / _FOUND).write_text(json.dumps(measured(given.folder, stage_samples=given.stage)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = make_rows(folder / "rows.jsonl", num_rows=NUM_ROWS, max_characters=_MAX_CHARACTERS)
        make_base(folder / "base", SHAPE, rows)
        found = in_its_own_process(folder, stage_samples=given.stage)
    phases = [PhasePeak(**phase) for phase in found["phases"]]
    figures = {
        **found,
        "goal": GOAL,
        "resident_spread": round(spread([phase.peak_bytes for phase in phases]), 4),
        "tensor_spread": round(spread([phase.tensor_bytes for phase in phases]), 4),
    }
    _print(phases, figures)
    if given.stage == STAGE_SAMPLES:
        write_report("ramp_memory", figures=figures, num_threads=given.threads)


def _print(phases: Sequence[PhasePeak], figures: dict[str, Any]) -> None:
    print_table(
        f"peak of the steps of each phase; resident within {figures['resident_spread']:.1%}, tensors within "
        f"{figures['tensor_spread']:.1%} (goal: {GOAL:.0%})",
        ["effective batch", "steps", "micro-batches", "resident", "tensors"],
        [
            [
                str(phase.effective_batch_size),
                str(phase.num_steps),
                str(phase.most_micro_batches),
                format_bytes(phase.peak_bytes),
                format_bytes(phase.tensor_bytes),
            ]
            for phase in phases
        ],
    )


if __name__ == "__main__":
    main()
