"""Time whole effective batches packed and padded on this CPU, each as its own plan cuts them, alternated.

    PYTHONPATH=examples python -m benchmarks.packing_cpu [--batches N] [--rows N] [KEY=VALUE …]

The model and the rows are the demo's; overrides change its configuration. CPU seconds of forward and backward passes,
so that what else the machine does counts little. The peaks are predicted, above what the process holds beside tensors.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
from numpy.typing import NDArray

from brim.batching import by_costs
from brim.config import load_config
from brim.models import load_llm
from brim.planning import plan_run
from brim.session import open_session, say_nothing, with_choices
from brim.train import MicroBatchPass
from brim.workflows.training import prepared_for
from brim.workflows.training.planning import request_of
from stdlib_code.dataset import TEST, instruction_rows, stdlib_modules, write_jsonl

CONFIG = Path("examples/stdlib_code/config.yaml")


class Layout:
    """Hold a model, a plan and its cut, with rows packed or padded."""

    def __init__(self, data: Path, overrides: list[str], *, is_packed: bool) -> None:
        config = load_config(CONFIG, [*overrides, f"trainer.packing={str(is_packed).lower()}"]).config
        session, _, prepared = prepared_for(open_session(config), data, resumed=None, notes=(), say=say_nothing)
        began = time.process_time()
        planned = plan_run(request_of(session, prepared), every_way=False, replan=True, say=say_nothing)
        self.plan_s = time.process_time() - began
        self.plan, self.request = planned.plan, planned.request
        assert self.plan.costs is not None, "it fits"
        assert self.plan.chosen is not None, "it fits"
        self.chosen = self.plan.chosen
        settled = with_choices(session, planned.choices)
        llm = load_llm(settled.config, settled.folder, settled.device, trainable=True)
        llm.model.train()
        self._rows, self._cutter = self.request.rows, by_costs(self.plan.costs, cap_bytes=self.chosen.cap_bytes)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        self._pass = MicroBatchPass(llm=llm, pad_id=settled.encoder.pad_id, scaler=scaler)

    def __str__(self) -> str:
        above = ((self.chosen.total_bytes or 0) - self.plan.budget.outside_bytes) / 2**20
        cut = f"{self.chosen.micro_batches_per_step:.1f} micro-batches a step, {self.chosen.padding_in_words} padding"
        return f"{cut}, {above:,.0f} MiB; planned in {self.plan_s:.1f} s of CPU"

    def seconds(self, batch: NDArray[np.int64]) -> float:
        """Return the CPU seconds of an effective batch."""
        began = time.process_time()
        supervised = int(self._rows.num_supervised[batch].sum())
        for part in self._cutter.cut(self._rows.lengths[batch]):
            self._pass(self._rows.take(batch[part.rows]), supervised, step=0)
        return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing_cpu", description=__doc__)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        write_jsonl([row for row in instruction_rows(stdlib_modules()) if row.split != TEST], data)
        overrides = [*asked.overrides, f"preprocessing.sample_size={asked.rows}"]
        padded, packed = (Layout(data, overrides, is_packed=is_packed) for is_packed in (False, True))
        print(f"padded: {padded}\npacked: {packed}", flush=True)
        size = padded.request.task.effective_batch_size
        for layout in (padded, packed):
            layout.seconds(padded.request.order[: min(size, 4)])  # warms up
        pairs = []
        for number in range(asked.batches):
            batch = padded.request.order[number * size : (number + 1) * size]
            order = (padded, packed) if number % 2 else (packed, padded)
            taken = {layout: layout.seconds(batch) for layout in order}
            pairs.append((taken[packed], taken[padded]))
    ratios = [one / other for one, other in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    print(
        f"packed ÷ padded: {median(ratios):.3f} ({low:.3f} to {high:.3f}) of {len(pairs)} pairs; "
        f"padded {median(other for _, other in pairs):.2f} s of CPU a step"
    )


if __name__ == "__main__":
    main()
