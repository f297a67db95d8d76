"""Measure a workload, each part of it in a fresh process, beside what was predicted (`brim memory --measure`).

A model can be run with fewer layers, and extrapolated to the whole one. Memory is linear in depth where layers are
alike: what all layers share, and so much for each. Layers that alternate (sliding and full attention) are alike by
periods, and layers at the front can differ from the rest (DeepSeek's first ones have no experts), so what is run is
the front and one, then two, periods.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from brim.config import accumulates
from brim.config.schema import Config, FinetuneTrainer
from brim.memory import MemoryPrediction, Timeline, predict_memory, with_checkpointing
from brim.memory.devices import PACKING_BYTES
from brim.memory.events import Phase
from brim.models import with_stored_quantization
from brim.models.folders import ModelFolder, locate
from brim.workflows.measure.messages import Leak, Measured, PhasePeak, Report, Request, as_json, of_json, rise_per_step
from brim.workflows.runs import Tell, run_child


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Hold a measurement beside the prediction of each phase that was measured."""

    measured: Measured
    predictions: Mapping[Phase, MemoryPrediction]

    @property
    def main(self) -> MemoryPrediction:
        """Return the prediction of the phase that was asked for, or of the first one."""
        return next(iter(self.predictions.values()))

    def predicted_bytes(self, peak: PhasePeak) -> int:
        """Return what was predicted for a measured peak: for that very step, where it is a step of training."""
        kept_bytes = PACKING_BYTES if peak.allocated_bytes is None else 0  # what a CPU keeps beside the tensors
        if peak.phase == "load":
            return _loaded_bytes(self.main.timeline)
        prediction = self.predictions[peak.phase]
        steps = prediction.step_peaks_bytes
        if peak.phase == "train" and peak.step is not None and steps:
            return steps[min(peak.step, len(steps)) - 1] + kept_bytes
        return prediction.allocated_bytes + kept_bytes

    def measured_bytes(self, peak: PhasePeak) -> int:
        """Return the bytes allocated; on a CPU the resident set less what was there before."""
        return peak.total_bytes - peak.baseline_bytes if peak.allocated_bytes is None else peak.allocated_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return both as JSON has them."""
        predictions = {phase: prediction.as_dict() for phase, prediction in self.predictions.items()}
        return {"predicted": predictions, "measured": as_json(self.measured)}


def measure_memory(
    config: Config,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    phase: Phase | None = None,
    steps: int | None = None,
    layers: int | None = None,
) -> Beside:
    """Predict, then run brim's own code on the local device with random rows of the shape.

    phase: this one and the loading before it; None: all. steps: of training; None: three. layers: run so many and twice
    as many layers, and extrapolate.
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
        predictions[each] = predict_memory(
            config, phase=each, device=None if has_cuda else "cpu", offload="none", **shape
        )
        settled = predictions[each].gradient_checkpointing
        if settled is not None:
            config = with_checkpointing(config, settled)  # which without a plan would be off
        shape = {"batch_size": predictions[each].batch_size, "sequence_length": predictions[each].sequence_length}
    measured = measure(
        config, folder, phases=tuple(dict.fromkeys(("load", *phases))), steps=steps or 3, layers=layers, **shape
    )
    return Beside(measured=measured, predictions=predictions)


def _loaded_bytes(timeline: Timeline) -> int:
    """Return the peak while the weights are loaded: of what comes before the second mark."""
    end = timeline.marks[1][0] if len(timeline.marks) > 1 else len(timeline.places)
    return int(timeline.allocated_bytes()[:end].max())


PHASES: tuple[Phase, ...] = ("load", "train", "evaluate", "generate")


# One rounding of the CUDA allocator; on a CPU what Python and the C library keep, up to 40 kB a step.
_TOLERANCE_BYTES: Mapping[str, int] = {"cuda": 512, "cpu": 2**20}


# Every tensor of a page or more is mapped by itself and goes back to the system at once, so that a peak is that of the
# work and not of what the C library keeps of earlier sizes (docs/decisions/0010-resident-memory-on-a-cpu.md).
RETURNED_AT_ONCE: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}


_MOST_MICRO_BATCHES = 2  # the second one finds the gradients of the first; more change no peak


def measure(
    config: Config,
    folder: ModelFolder,
    *,
    batch_size: int,
    sequence_length: int,
    phases: Sequence[Phase] = PHASES,
    steps: int = 3,
    layers: int | None = None,
) -> Measured:
    """Run brim's own code on random token rows of this shape, and measure its memory.

    folder: needs config.json alone; where there are no weights, or `layers` is given, they are drawn at random.
    steps: of training; from five on, it is seen whether they leave memory behind. layers: run this many and twice as
    many decoder layers, and extrapolate to the model's depth.

    Raises BrimError where the device is too small, or its memory cannot be measured.
    """
    request = Request(
        config=config,
        folder=folder,
        batch_size=batch_size,
        sequence_length=sequence_length,
        step_lengths=((sequence_length,) * (batch_size * _micro_batches(config, batch_size)),),
        num_steps=steps,
        phases=tuple(phases),
        device=None,
    )
    parts = _parts(request)
    found = None if layers is None else depths(folder.config, layers)
    layers_run: tuple[int, ...]
    if found is None:
        whole = num_layers(folder.config) or 0
        layers_run, note = (whole,), f"the whole model was run: it has {whole or 'an unknown number of'} layers"
        reports = [measured_alone(part) for part in parts]
    else:
        whole, layers_run = found.whole, (found.fewer, found.more)
        note = f"extrapolated from {found.fewer} and {found.more} layers of random weights to {whole}"
        reports = [_of_two_depths(part, found) for part in parts]
    # Each process loads the model, which is reported once.
    peaks = [
        each for part, report in zip(parts, reports, strict=True) for each in report.peaks if each.phase in part.phases
    ]
    notes = [*([] if layers is None else [note]), *(each for report in reports for each in report.notes)]
    return Measured(
        device=reports[0].device,
        kind=reports[0].kind,
        batch_size=batch_size,
        sequence_length=sequence_length,
        num_layers=whole,
        layers_run=layers_run,
        baseline_bytes=reports[0].baseline_bytes,
        peaks=tuple(peaks),
        leak=leak_of(peaks, reports[0].kind) if found is None else None,  # extrapolation would multiply what is noise
        notes=tuple(dict.fromkeys(notes)),
    )


def measured_alone(request: Request, environment: Mapping[str, str] = RETURNED_AT_ONCE) -> Report:
    """Measure in a new process. Raises BrimError with the problems that it met.

    environment: further variables for that process; this one's own win.
    """
    with tempfile.TemporaryDirectory() as name, _with_weights(request, Path(name)) as ready:
        return of_json(Report, _run(measured_here, as_json(ready), Path(name), environment))


def _parts(request: Request) -> list[Request]:
    """Divide the phases between processes: training in one, the others in another, with the adapter loaded as well."""
    training = tuple(phase for phase in request.phases if phase in ("load", "train"))
    others = tuple(phase for phase in request.phases if phase not in training)
    if not request.trainable or not training or not others:
        return [request]
    return [replace(request, phases=training), replace(request, phases=others)]


def _of_two_depths(part: Request, found: Depths) -> Report:
    """Measure two depths, and extrapolate their peaks along a line."""
    fewer, more = (
        measured_alone(
            replace(part, folder=replace(part.folder, config=with_layers(part.folder.config, count), has_weights=False))
        )
        for count in (found.fewer, found.more)
    )
    peaks = (extrapolated(one, two, found) for one, two in zip(fewer.peaks, more.peaks, strict=True))
    return replace(more, peaks=tuple(peaks))


def leak_of(peaks: Sequence[PhasePeak], kind: str) -> Leak | None:
    """Return the leak that the ends of the steps show, if they show one. kind: of the device."""
    end_bytes = tuple(peak.end_bytes for peak in peaks if peak.phase == "train")
    rise = rise_per_step(end_bytes, tolerance_bytes=_TOLERANCE_BYTES[kind])
    return None if rise is None else Leak(bytes_per_step=rise, end_bytes=end_bytes)


def _micro_batches(config: Config, rows: int) -> int:
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        return 1
    effective = trainer.effective_batch_size
    several = accumulates(trainer) if effective == "auto" else effective > rows
    return _MOST_MICRO_BATCHES if several else 1


@contextmanager
def _with_weights(request: Request, scratch: Path) -> Iterator[Request]:
    """Yield the request on a folder that can be loaded: where there are no weights, they are drawn at random."""
    if request.folder.has_weights and request.config.initialize == "pretrained":
        yield request
        return
    base = scratch / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(request.folder.config), encoding="utf-8")
    folder = replace(request.folder, path=base, name=str(base))
    if request.config.quantization is None:
        yield replace(request, folder=folder, config=request.config.model_copy(update={"initialize": "random"}))
        return
    _run(write_weights, {"folder": str(base)}, scratch, {})  # what is quantised is loaded from the disk
    yield replace(request, folder=folder, config=request.config.model_copy(update={"initialize": "pretrained"}))


def _run(
    function: Callable[[Mapping[str, Any], Tell], Any],
    order: Mapping[str, Any],
    scratch: Path,
    environment: Mapping[str, str],
) -> Any:
    log = scratch / "log.txt"
    settled = {name: os.environ.get(name, value) for name, value in environment.items()}
    ended = run_child(function, order, log=log, environment=settled)
    return ended.require(
        "the process that measured", fix="a smaller --batch-size or --sequence-length, or --layers 1", log=log
    )


def measured_here(order: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Carry out a `Request` in the child that was started for it. Return the report as JSON."""
    from brim.workflows.measure.work import run

    warnings.simplefilter("ignore")  # nobody reads this process's terminal
    return as_json(run(of_json(Request, order)))


def write_weights(order: Mapping[str, Any], tell: Tell) -> None:
    """Write random weights beside the config.json of a folder, in a child, whose memory is freed when it ends."""
    from brim.workflows.measure.work import write_random_weights

    write_random_weights(Path(order["folder"]))


_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


_FRONT_KEY = "first_k_dense_replace"


@dataclass(frozen=True, slots=True)
class Depths:
    """Name the depths that are run in place of the whole model."""

    fewer: int  # layers
    more: int
    whole: int


def depths(config: Mapping[str, Any], layers: int) -> Depths | None:
    """Choose two depths to run; None where the whole model is not deeper, or config.json does not give its depth.

    config: config.json. layers: what the user asked for, in periods of layers that differ.
    """
    section = _section(config)
    whole = num_layers(config)
    if whole is None:
        return None
    front = section.get(_FRONT_KEY)
    front = front if isinstance(front, int) else 0
    step = max(layers, 1) * _period(section, whole, front)
    found = Depths(front + step, front + 2 * step, whole)
    return found if found.more < whole else None


def num_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of decoder layers in config.json."""
    section = _section(config)
    return next((int(section[key]) for key in _DEPTH_KEYS if isinstance(section.get(key), int)), None)


def with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Shorten config.json to the model's first layers; lists with an entry for each layer are shortened, too."""
    whole = num_layers(config)
    section = dict(_section(config))
    for key, value in section.items():
        if key in _DEPTH_KEYS:
            section[key] = count
        elif isinstance(value, list) and len(value) == whole and "layer" in key:
            section[key] = value[:count]
    nested = config.get("text_config")
    return {**config, "text_config": section} if isinstance(nested, dict) else section


def extrapolated(fewer: PhasePeak, more: PhasePeak, of: Depths) -> PhasePeak:
    """Return the peak at the whole depth, on the line through two measured ones."""
    assert (fewer.phase, fewer.step) == (more.phase, more.step), "the same phase at two depths"
    sizes = {name: _on_line(getattr(fewer, name), getattr(more, name), of) for name in _SIZES}
    return replace(more, **sizes)


_SIZES = ("allocated_bytes", "reserved_bytes", "outside_bytes", "total_bytes", "end_bytes")  # of what the layers add to


def _on_line(first: int | None, second: int | None, of: Depths) -> Any:
    if first is None or second is None:
        return None
    return round(first + (second - first) * (of.whole - of.fewer) / (of.more - of.fewer))


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _period(section: Mapping[str, Any], whole: int, front: int) -> int:
    """Return the number of layers after which their kinds repeat, in every list of kinds."""
    kinds = [
        value[front:]
        for key, value in section.items()
        if isinstance(value, list) and len(value) == whole and "layer" in key
    ]
    least = 1
    while any(each[least:] != each[:-least] for each in kinds if least < len(each)):
        least += 1
    return least
