"""Measure the peak resident set of a training step on this machine's CPU against the prediction.

    python -m benchmarks.memory_cpu

A model of 30 million parameters, twenty and more shapes, each in a process of its own. Predicted is what was resident
before the weights and the bytes that live at the trace's peak; calibrated adds what one shape, the probe, took beyond
that. Some shapes are measured once more with the C library's own thresholds, under which it keeps freed memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.memory_foretold import train_peaks
from benchmarks.report import print_table, write_report
from brim.config import load_config
from brim.models.folders import ModelFolder, locate
from brim.workflows.measure.messages import Request
from brim.workflows.measure.run import RETURNED_AT_ONCE, measured_alone

GOAL, GOAL_CALIBRATED = 0.10, 0.05
NUM_STEPS = 2
MODEL: Mapping[str, Any] = {  # 28.6 million parameters, of which the vocabulary has the larger part, as in small models
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Hold one way to train it."""

    rows: int
    tokens: int
    settings: str = "full"  # see _SETTINGS

    @property
    def name(self) -> str:
        return f"{self.settings}, {self.rows} × {self.tokens}"


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "LoRA": {"adapter": {"type": "lora", "target_modules": "all-linear"}},
    "checkpointing": {"trainer": {"enable_gradient_checkpointing": True}},
    "eager": {"model_parameters": {"attn_implementation": "eager"}},
    "whole logits": {"trainer": {"chunked_loss": False}},
    "sgd": {"trainer": {"optimizer": {"type": "sgd"}}},
    "two micro-batches": {"trainer": {"gradient_accumulation_steps": 2}},
}
PROBE = Shape(rows=2, tokens=128)
SHAPES: tuple[Shape, ...] = (
    PROBE,
    *(Shape(rows=rows, tokens=tokens) for rows in (1, 4, 16) for tokens in (64, 333, 512)),
    Shape(rows=1, tokens=1024),
    Shape(rows=2, tokens=2000),
    Shape(rows=32, tokens=48),
    *(Shape(rows=4, tokens=512, settings=settings) for settings in _SETTINGS if settings != "full"),
    *(Shape(rows=8, tokens=256, settings=settings) for settings in ("LoRA", "whole logits", "checkpointing")),
)
KEPT: tuple[Shape, ...] = (
    Shape(rows=4, tokens=333),
    Shape(rows=16, tokens=512),
    Shape(rows=4, tokens=512, settings="LoRA"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Hold one shape: the peaks of its first step and of those after it."""

    shape: str
    baseline_bytes: int
    measured_bytes: tuple[int, ...]  # resident, by step
    live_bytes: tuple[int, ...]  # predicted, by step

    def errors(self, constant_bytes: int = 0) -> list[float]:
        """Return, by step, the relative error of baseline + live bytes + a constant."""
        return [
            (self.baseline_bytes + live + constant_bytes) / measured - 1
            for live, measured in zip(self.live_bytes, self.measured_bytes, strict=True)
        ]

    @property
    def beyond_bytes(self) -> int:
        """Return what the last step took that the prediction does not know of."""
        return self.measured_bytes[-1] - self.baseline_bytes - self.live_bytes[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak resident set on a CPU, measured against predicted.")
    parser.add_argument("--only", default="", help="shapes whose name holds this, and the probe")
    given = parser.parse_args()
    shapes = [shape for shape in SHAPES if given.only in shape.name or shape is PROBE]
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), MODEL)
        figures = [bench.figure(shape) for shape in shapes]
        kept = [bench.figure(shape, environment={}) for shape in KEPT if not given.only]
    report = summary(figures, kept)
    _show(figures, report)
    write_report("memory_cpu", figures=report, num_threads=torch.get_num_threads())


class Bench:
    """Hold the model's folder, and what is done with it."""

    def __init__(self, base: Path, model: Mapping[str, Any]) -> None:
        (base / "config.json").write_text(json.dumps(model), encoding="utf-8")
        self._base = base
        self._folder: ModelFolder = locate(str(base), config_only=True)

    def figure(self, shape: Shape, environment: Mapping[str, str] = RETURNED_AT_ONCE) -> Figure:
        """Measure one shape and predict it. environment: of the process that is measured."""
        settings = self._settings(shape)
        config = load_config(settings).config.model_copy(update={"initialize": "random"})
        trainer = settings["trainer"]
        request = Request(
            config=config,
            folder=self._folder,
            batch_size=shape.rows,
            sequence_length=shape.tokens,
            step_lengths=((shape.tokens,) * (shape.rows * trainer.get("gradient_accumulation_steps", 1)),),
            num_steps=NUM_STEPS,
            phases=("train",),
            device="cpu",
        )
        report = measured_alone(request, environment)
        foretold = train_peaks(settings, [(shape.rows, shape.tokens)] * NUM_STEPS, {"name": "cpu"})
        return Figure(
            shape=shape.name,
            baseline_bytes=report.baseline_bytes,
            measured_bytes=tuple(peak.total_bytes for peak in report.peaks if peak.phase == "train"),
            live_bytes=tuple(each.allocated_bytes for each in foretold),
        )

    def _settings(self, shape: Shape) -> dict[str, Any]:
        own = _SETTINGS[shape.settings]
        trainer = {"type": "finetune", "batch_size": shape.rows, "learning_rate": 1e-4, **own.get("trainer", {})}
        return {"base_model": str(self._base), "precision": "fp32", **own, "trainer": trainer}


def summary(figures: Sequence[Figure], kept: Sequence[Figure]) -> dict[str, Any]:
    """Return the figures of all shapes. figures: the probe first. kept: with the C library's own thresholds."""
    constant = figures[0].beyond_bytes
    return {
        "goal": GOAL,
        "goal_calibrated": GOAL_CALIBRATED,
        "shapes": len(figures),
        "error": _spread([error for figure in figures for error in figure.errors()]),
        "error_calibrated": _spread([error for figure in figures[1:] for error in figure.errors(constant)]),
        "constant_bytes": constant,
        "runs": [asdict(figure) for figure in figures],
        "runs_with_default_thresholds": [asdict(figure) for figure in kept],
    }


def _spread(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"median": median(sizes), "largest": max(sizes)} if sizes else {}


def _show(figures: Sequence[Figure], report: Mapping[str, Any]) -> None:
    print_table(
        "peak resident set of training steps (MiB)",
        ("shape", "before", *(f"step {step + 1}" for step in range(NUM_STEPS)), "live", "error", "calibrated"),
        list(_rows(figures, report["constant_bytes"])),
    )
    print(json.dumps({key: report[key] for key in ("shapes", "error", "error_calibrated", "constant_bytes")}))


def _rows(figures: Sequence[Figure], constant_bytes: int) -> Iterator[tuple[str, ...]]:
    for figure in figures:
        yield (
            figure.shape,
            _mib(figure.baseline_bytes),
            *(_mib(measured) for measured in figure.measured_bytes),
            _mib(figure.live_bytes[-1]),
            f"{figure.errors()[-1]:+.2%}",
            f"{figure.errors(constant_bytes)[-1]:+.2%}",
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


if __name__ == "__main__":
    main()
