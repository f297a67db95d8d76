"""`brim memory --measure`: what the device at hand takes, beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from brim.api.memory import predict_memory, with_checkpointing
from brim.config import Config, FinetuneTrainer
from brim.memory.device import PACKING_BYTES
from brim.memory.measure.process import measure
from brim.memory.measure.result import Measured, PhasePeak
from brim.memory.prediction import MemoryPrediction, Phase, Timeline
from brim.models.folder import locate
from brim.models.quantization import with_stored_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A measurement, and the prediction of each phase that was measured."""

    measured: Measured
    predictions: Mapping[Phase, MemoryPrediction]

    @property
    def main(self) -> MemoryPrediction:
        """Of the phase that was asked for, or of the first one."""
        return next(iter(self.predictions.values()))

    def predicted_bytes(self, peak: PhasePeak) -> int:
        """What was foretold of a measured peak: of a step of training, of that step."""
        kept_bytes = PACKING_BYTES if peak.allocated_bytes is None else 0  # what a CPU keeps beside the tensors
        if peak.phase == "load":
            return _loaded_bytes(self.main.timeline)
        prediction = self.predictions[peak.phase]
        steps = prediction.step_peaks_bytes
        if peak.phase == "train" and peak.step is not None and steps:
            return steps[min(peak.step, len(steps)) - 1] + kept_bytes
        return prediction.allocated_bytes + kept_bytes

    def measured_bytes(self, peak: PhasePeak) -> int:
        """Allocated; on a CPU the resident set less what was there before."""
        return peak.total_bytes - peak.baseline_bytes if peak.allocated_bytes is None else peak.allocated_bytes

    def as_dict(self) -> dict[str, Any]:
        """Both, for JSON."""
        predictions = {phase: prediction.as_dict() for phase, prediction in self.predictions.items()}
        return {"predicted": predictions, "measured": self.measured.as_dict()}


def measure_memory(
    config: Config,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    phase: Phase | None = None,
    steps: int | None = None,
    layers: int | None = None,
    snapshot: Path | None = None,
) -> Beside:
    """Predict, then run brim's own code on the device at hand with random rows of the shape.

    phase: this one and the loading before it; None: all. steps: of training, over which memory is recorded in time;
    None: a few, and no recording. layers: run so many and twice as many layers, and extrapolate. snapshot: for
    PyTorch's memory snapshot, which CUDA alone has.
    """
    folder = locate(
        config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code, config_only=True
    )
    config = with_stored_quantization(config, folder)
    has_cuda = torch.cuda.is_available()
    trains = isinstance(config.trainer, FinetuneTrainer)
    others: tuple[Phase, ...] = ("evaluate", "generate")
    phases: tuple[Phase, ...] = (phase,) if phase is not None else ("train", *others) if trains else others
    shape: dict[str, Any] = {"batch_size": batch_size, "sequence_length": sequence_length}
    predictions: dict[Phase, MemoryPrediction] = {}
    for each in phases:
        predictions[each] = predict_memory(config, phase=each, device=None if has_cuda else "cpu", **shape)
        settled = predictions[each].gradient_checkpointing
        if settled is not None:
            config = with_checkpointing(config, settled)  # which without a plan would be off
        shape = {"batch_size": predictions[each].batch_size, "sequence_length": predictions[each].sequence_length}
    measured = measure(
        config,
        folder,
        phases=tuple(dict.fromkeys(("load", *phases))),
        steps=steps or 3,
        layers=layers,
        timeline=steps is not None,
        snapshot=snapshot if has_cuda and steps is not None else None,
        **shape,
    )
    return Beside(measured=measured, predictions=predictions)


def _loaded_bytes(timeline: Timeline) -> int:
    """The most while the weights are loaded: what stands before the second mark."""
    end = timeline.marks[1][0] if len(timeline.marks) > 1 else len(timeline.places)
    return int(timeline.allocated_bytes()[:end].max())
