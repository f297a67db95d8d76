"""Hold predictions against measurements, and against the goals that they are to reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.memory_public.answer import AnswerRow
from benchmarks.memory_public.rows import Group, Row
from brim.memory import MemoryPrediction

# Of the relative error: median and largest. Issue 4 of brim set them.
PEAK_GOALS: dict[Group, tuple[float, float]] = {
    "full and LoRA, one GPU": (0.005, 0.02),
    "4-bit, one GPU": (0.01, 0.03),
    "FSDP on 2 and 4 GPUs": (0.02, 0.05),
}
END_GOAL = 0.001  # median
FORETOLD_GOAL = 0.95  # share of the failed runs
RESERVED_GOAL = (0.04, 0.10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Hold a row, and what was predicted of it."""

    row: Row
    predicted: MemoryPrediction

    @property
    def peak_error(self) -> float | None:
        """Return the relative error of the peak; None where the run failed."""
        return _error(self.predicted.allocated_bytes, self.row.peak_allocated_bytes)

    @property
    def end_error(self) -> float | None:
        """Return the relative error of what is allocated when training is over."""
        return _error(self.predicted.end_allocated_bytes, self.row.end_allocated_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the row and its errors for JSON."""
        row, predicted = self.row, self.predicted
        return {
            "id": row.id,
            "group": row.group,
            "model": row.model,
            "method": row.method,
            "kernels": row.kernels,
            "precision": row.precision,
            "batch_size": row.batch_size,
            "sequence_length": row.sequence_length,
            "gpus": row.gpus,
            "ran": row.ran,
            "measured_peak_allocated_bytes": row.peak_allocated_bytes,
            "predicted_peak_allocated_bytes": predicted.allocated_bytes,
            "peak_error": self.peak_error,
            "measured_end_allocated_bytes": row.end_allocated_bytes,
            "predicted_end_allocated_bytes": predicted.end_allocated_bytes,
            "end_error": self.end_error,
            "measured_nvidia_smi_mib": row.nvidia_smi_mib,
            "predicted_reserved_bytes": predicted.reserved_bytes,
            "predicted_total_bytes": predicted.total_bytes,
            "predicted_fits": predicted.fits,
            "peak_at": f"{predicted.peak.phase} {predicted.peak.module} {predicted.peak.operator}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hold one line of the summary."""

    what: str
    rows: int
    reached: str
    goal: str
    met: bool


def verdicts(judged: Sequence[Judged]) -> list[Verdict]:
    """The goals, one after the other; those without rows are left out."""
    lines = [line for group in PEAK_GOALS for line in _peaks(group, judged)]
    return [*lines, *_ends(judged), *_fits(judged)]


def _peaks(group: Group, judged: Sequence[Judged]) -> Iterator[Verdict]:
    errors = [abs(each.peak_error) for each in judged if each.row.group == group and each.peak_error is not None]
    goal = PEAK_GOALS[group]
    if not errors:
        return
    yield Verdict(
        what=f"peak allocated, {group}",
        rows=len(errors),
        reached=f"median {median(errors):.4%}, largest {max(errors):.3%}",
        goal=f"median ≤ {goal[0]:.1%}, largest ≤ {goal[1]:.0%}",
        met=median(errors) <= goal[0] and max(errors) <= goal[1],
    )


def _ends(judged: Sequence[Judged]) -> Iterator[Verdict]:
    errors = [abs(each.end_error) for each in judged if each.end_error is not None]
    if not errors:
        return
    yield Verdict(
        what="end-of-step allocated",
        rows=len(errors),
        reached=f"median {median(errors):.4%}, largest {max(errors):.3%}",
        goal=f"median ≤ {END_GOAL:.1%}",
        met=median(errors) <= END_GOAL,
    )


def _fits(judged: Sequence[Judged]) -> Iterator[Verdict]:
    ran = [each.predicted.fits for each in judged if each.row.ran]
    failed = [each.predicted.fits for each in judged if not each.row.ran]
    refused, foretold = ran.count(False), failed.count(False)
    if ran:
        yield Verdict(
            what="runs that ran", rows=len(ran), reached=f"{refused} refused", goal="0 refused", met=refused == 0
        )
    if failed:
        share = foretold / len(failed)
        yield Verdict(
            what="runs that failed",
            rows=len(failed),
            reached=f"{foretold} foretold ({share:.0%})",
            goal=f"≥ {FORETOLD_GOAL:.0%} foretold",
            met=share >= FORETOLD_GOAL,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """Hold an Answer.AI run: most measured what is reserved, one what is allocated."""

    row: AnswerRow
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Return the relative error."""
        return self.predicted_bytes / self.row.measured_bytes - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the row and its errors for JSON."""
        row = self.row
        return {
            "id": row.id,
            "model": row.model,
            "batch_size": row.batch_size,
            "sequence_length": row.sequence_length,
            "strategy": row.strategy,
            "metric": row.metric,
            "measured_bytes": row.measured_bytes,
            "predicted_bytes": self.predicted_bytes,
            "error": self.error,
        }


def answer_verdicts(judged: Sequence[JudgedAnswer]) -> Iterator[Verdict]:
    """Yield peak reserved; what measured something else is shown and not judged."""
    errors = [abs(each.error) for each in judged if each.row.metric == "reserved"]
    if not errors:
        return
    yield Verdict(
        what="peak reserved, Answer.AI",
        rows=len(errors),
        reached=f"median {median(errors):.2%}, largest {max(errors):.2%}",
        goal=f"median ≤ {RESERVED_GOAL[0]:.0%}, largest ≤ {RESERVED_GOAL[1]:.0%}",
        met=median(errors) <= RESERVED_GOAL[0] and max(errors) <= RESERVED_GOAL[1],
    )


def _error(predicted: int, measured: int | None) -> float | None:
    return None if measured is None else predicted / measured - 1
