"""Measure a workload: each part of it in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from brim.config import Config, FinetuneTrainer
from brim.config.batch import accumulates
from brim.errors import BrimError, ConfigError, InputError, Problem
from brim.memory.measure.depth import Depths, depths, extrapolated, num_layers, with_layers
from brim.memory.measure.leak import LEAST_RISES, WARM_UP_STEPS, rise_per_step
from brim.memory.measure.report import Report
from brim.memory.measure.request import Request
from brim.memory.measure.result import Leak, Measured, PhasePeak
from brim.memory.prediction import Phase
from brim.models.folder import ModelFolder
from brim.models.needs import require_trainable

PHASES: tuple[Phase, ...] = ("load", "train", "evaluate", "generate")
LEAST_STEPS = WARM_UP_STEPS + 1 + LEAST_RISES  # from this many on, a leak can be told
# Every tensor of a page or more is mapped by itself and goes back to the system at once, so that a peak is that of the
# work and not of what the C library keeps of earlier sizes (docs/decisions/0010-resident-memory-on-a-cpu.md).
RETURNED_AT_ONCE: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
_MOST_MICRO_BATCHES = 2  # the second one finds the gradients of the first; more change no peak
_SHOWN_CHARACTERS = 2_000  # of what a process that failed printed last


def measure(
    config: Config,
    folder: ModelFolder,
    *,
    batch_size: int,
    sequence_length: int,
    phases: Sequence[Phase] = PHASES,
    steps: int = 3,
    layers: int | None = None,
    timeline: bool = False,
    snapshot: Path | None = None,
    device: str | None = None,
) -> Measured:
    """Run brim's own code on random token rows of this shape, and say what it took.

    folder: needs config.json alone; where there are no weights, or `layers` is given, they are drawn at random.
    steps: of training; with five or more, a leak is looked for. layers: run this many and twice as many decoder
    layers, and extrapolate to the model's depth. timeline: run the steps once more and record memory over time.
    snapshot: where to keep PyTorch's memory snapshot (CUDA; implies `timeline`). device: "cpu", "cuda"; None takes the
    one at hand.

    Raises ConfigError where training is asked for and the configuration has none; BrimError where the device is too
    small, or says nothing of its memory.
    """
    _require_possible(config, folder, phases, sequence_length)
    request = Request(
        config=config,
        folder=folder,
        trainable=isinstance(config.trainer, FinetuneTrainer),
        batch_size=batch_size,
        sequence_length=sequence_length,
        step_lengths=((sequence_length,) * (batch_size * _micro_batches(config, batch_size)),),
        num_steps=steps,
        phases=tuple(phases),
        device=device,
        records=False,
        snapshot=None,
        looks_for_leaks=steps >= LEAST_STEPS,
    )
    found = None if layers is None else depths(folder.config, layers)
    if found is not None:
        return _by_depth(request, found)
    reports = [measured_alone(part) for part in _parts(request)]
    recorded = None
    if timeline or snapshot is not None:
        recorded = measured_alone(replace(_parts(request)[0], records=True, snapshot=snapshot))
    whole = num_layers(folder.config) or 0
    return _measured(
        request, reports, recorded, layers_run=(whole,), num_layers=whole, notes=_short(layers, folder.config)
    )


def measured_alone(request: Request, environment: Mapping[str, str] = RETURNED_AT_ONCE) -> Report:
    """Measure in a process of its own. Raises BrimError with the problems that it met.

    environment: of that process, beside this one's, which wins.
    """
    with tempfile.TemporaryDirectory() as name, _with_weights(request, Path(name)) as ready:
        folder = Path(name)
        (folder / "request.json").write_text(ready.dumps(), encoding="utf-8")
        return _report_in(folder, _run("brim.memory.measure", folder, environment))


def _require_possible(config: Config, folder: ModelFolder, phases: Sequence[Phase], sequence_length: int) -> None:
    if "train" in phases:
        require_trainable(config, folder)
        if not isinstance(config.trainer, FinetuneTrainer):
            raise ConfigError(
                Problem(
                    what="a training step cannot be measured: the configuration trains nothing",
                    where="trainer.type",
                    expected="finetune",
                    fix="set trainer.type: finetune, or measure other phases",
                )
            )
    context = folder.context_length
    if context is not None and sequence_length > context:
        raise InputError(
            Problem(
                what=f"rows of {sequence_length:,} tokens are longer than the model's context",
                where="--sequence-length",
                expected=f"at most {context:,}",
                fix="choose a shorter one",
            )
        )


def _parts(request: Request) -> list[Request]:
    """What is measured in one process: training, and the rest on such a model as it leaves, adapter and all."""
    training = tuple(phase for phase in request.phases if phase in ("load", "train"))
    others = tuple(phase for phase in request.phases if phase not in training)
    if not request.trainable or not training or not others:
        return [request]
    return [replace(request, phases=training), replace(request, phases=others)]


def _by_depth(request: Request, found: Depths) -> Measured:
    """The peaks on the line through those of two depths."""
    config = request.folder.config
    by_depth = []
    for count in (found.fewer, found.more):
        cut = replace(request, folder=replace(request.folder, config=with_layers(config, count), has_weights=False))
        by_depth.append([measured_alone(part) for part in _parts(cut)])
    fewer, more = ([peak for report in reports for peak in report.peaks] for reports in by_depth)
    reports = [replace(report, peaks=()) for report in by_depth[1]]
    peaks = [extrapolated(one, two, found) for one, two in zip(fewer, more, strict=True)]
    reports[0] = replace(reports[0], peaks=tuple(peaks))
    note = f"extrapolated from {found.fewer} and {found.more} layers of random weights to {found.whole}"
    return _measured(request, reports, None, layers_run=(found.fewer, found.more), num_layers=found.whole, notes=[note])


def _measured(
    request: Request,
    reports: Sequence[Report],
    recorded: Report | None,
    *,
    layers_run: tuple[int, ...],
    num_layers: int,
    notes: Sequence[str],
) -> Measured:
    first = reports[0]
    told = [*notes, *(note for report in reports for note in report.notes)]
    return Measured(
        device=first.device,
        kind=first.kind,
        batch_size=request.batch_size,
        sequence_length=request.sequence_length,
        num_layers=num_layers,
        layers_run=layers_run,
        baseline_bytes=first.baseline_bytes,
        peaks=tuple(_once([peak for report in reports for peak in report.peaks], request.phases)),
        timeline=None if recorded is None else recorded.timeline,
        leak=_leak(reports, recorded),
        snapshot=request.snapshot,
        notes=tuple(dict.fromkeys(told)),
    )


def _once(peaks: Sequence[PhasePeak], phases: Sequence[Phase]) -> Iterator[PhasePeak]:
    """Loading is part of each process; it is told once, and where it was asked for."""
    loads = 0
    for peak in peaks:
        loads += peak.phase == "load"
        if peak.phase in phases and (peak.phase != "load" or loads == 1):
            yield peak


def _leak(reports: Sequence[Report], recorded: Report | None) -> Leak | None:
    for report in reports:
        tolerance_bytes = 512 if report.kind == "cuda" else 0  # one rounding of the CUDA allocator
        rise = rise_per_step(report.end_bytes, tolerance_bytes=tolerance_bytes)
        if rise is not None:
            stayed = recorded.stayed if recorded is not None else report.stayed
            return Leak(bytes_per_step=rise, end_bytes=report.end_bytes, stayed=stayed)
    return None


def _micro_batches(config: Config, rows: int) -> int:
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        return 1
    effective = trainer.effective_batch_size
    several = accumulates(trainer) if effective == "auto" else effective > rows
    return _MOST_MICRO_BATCHES if several else 1


def _short(layers: int | None, config: Mapping[str, object]) -> list[str]:
    if layers is None:
        return []
    return [f"the whole model was run: it has {num_layers(config) or 'an unknown number of'} layers"]


@contextmanager
def _with_weights(request: Request, scratch: Path) -> Iterator[Request]:
    """The request on a folder that can be loaded: where there are no weights, they are drawn at random."""
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
    _run("brim.memory.measure.weights", base, {})  # what is quantised is loaded from the disk
    yield replace(request, folder=folder, config=request.config.model_copy(update={"initialize": "pretrained"}))


def _run(module: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        env={**environment, **os.environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )


def _report_in(folder: Path, ended: subprocess.CompletedProcess[bytes]) -> Report:
    report, error = folder / "report.json", folder / "error.json"
    if report.exists():
        return Report.loads(report.read_text(encoding="utf-8"))
    if error.exists():
        told = json.loads(error.read_text(encoding="utf-8"))
        problems = [Problem(**problem) for problem in told["problems"]]
        raise (InputError if told["exit_code"] == InputError.exit_code else BrimError)(*problems)
    last = ended.stderr.decode(errors="replace")[-_SHOWN_CHARACTERS:].strip()
    killed = "; the system ends a process that takes too much memory" if ended.returncode == -9 else ""
    raise BrimError(
        Problem(
            what=f"the process that measured ended with {ended.returncode}{killed}" + (f": {last}" if last else ""),
            fix="a smaller --batch-size or --sequence-length, or --layers 1",
        )
    )
