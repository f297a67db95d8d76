"""What is promised of a run that was interrupted: CONTRACT.md, "What equals what"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kept = Literal["bits", "close", "open"]  # equal to the bit; within a tolerance; nothing is promised

# Relative, of the losses of a sequence of steps.
_LOSS_FP32_LINEAR = 1e-5  # LoRA or SGD
_LOSS_FP32_ADAM = 1e-4  # near-zero second moments amplify the last bits
_LOSS_LOW_PRECISION = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What must be equal, by what it is."""

    states: Kept  # weights, optimizer, random states
    figures: Kept  # losses and evaluations
    loss_tolerance: float  # relative; 0 where figures are equal to the bit
    same_cut: bool  # a step has the same micro-batches
    why: str

    def of(self, kind: Literal["plan", "cut", "figure", "state", "other"]) -> Kept:
        """plan: rows, sizes and learning rates, which are equal everywhere."""
        if kind == "plan":
            return "bits"
        if kind == "cut":
            return "bits" if self.same_cut else "open"
        if kind == "figure":
            return self.figures
        return self.states


def promise_of(settings: Mapping[str, Any], *, device: str, ran_out_of_memory: bool) -> Promise:
    """settings: the run's resolved configuration. device: its name; "cpu" for a CPU."""
    same_cut = not ran_out_of_memory
    if device == "cpu" and same_cut:
        return Promise(states="bits", figures="bits", loss_tolerance=0.0, same_cut=True, why="on a CPU, with one plan")
    why = "memory ran out, and a step was cut otherwise" if ran_out_of_memory else f"on {device}, not on a CPU"
    if ran_out_of_memory and _drops_by_batch(settings):
        return Promise(
            states="open", figures="open", loss_tolerance=0.0, same_cut=False, why=f"{why}; dropout is drawn for a cut"
        )
    return Promise(states="open", figures="close", loss_tolerance=_tolerance(settings), same_cut=same_cut, why=why)


def _tolerance(settings: Mapping[str, Any]) -> float:
    optimizer = settings["trainer"]["optimizer"]["type"]
    if settings["precision"] != "fp32" or settings.get("quantization") or "8bit" in optimizer:
        return _LOSS_LOW_PRECISION
    return _LOSS_FP32_LINEAR if settings.get("adapter") or optimizer.startswith("sgd") else _LOSS_FP32_ADAM


def _drops_by_batch(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter's dropout depends on which rows go together. A base's own dropout is not in its settings."""
    adapter = settings.get("adapter") or {}
    return bool(adapter.get("dropout")) and not settings["trainer"]["dropout_by_row"]
