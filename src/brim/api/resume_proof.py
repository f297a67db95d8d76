"""What a tried resumption showed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brim.api.resume_comparison import Check
from brim.api.resume_promise import Promise
from brim.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeProof:
    """What was tried, and how it compares."""

    run: Path
    device: str
    precision: str
    checkpoint_step: int  # whose checkpoint of the run it began with; 0: none, from the start
    start_step: int  # after which the undisturbed and the disturbed run part
    num_steps: int  # that each of them made
    effective_batch_sizes: tuple[int, ...]
    stopped_after: int | None  # the step in which Ctrl-C came
    killed_in: int  # the step in which SIGKILL came
    killed_where: str
    promise: Promise
    checks: tuple[Check, ...]
    own_log: str  # how the run's own log compares, which is part of no promise
    seconds: float
    folder: Path | None  # of the two runs, where they are kept

    def __repr__(self) -> str:
        first, last = self.start_step + 1, self.start_step + self.num_steps
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        checks = (f"\n  {check.name}: {check.found}" for check in self.checks)
        return f"ResumeProof: {steps} of {self.run}: {self.verdict}{''.join(checks)}"

    @property
    def verdict(self) -> str:
        """Whether what is promised is kept, in a sentence."""
        took = f"({format_seconds(self.seconds)})"
        if not self.holds:
            names = ", ".join(check.name for check in self.checks if not check.holds)
            return f"the interruption changed what it must not: {names} {took}"
        if all(check.difference is None for check in self.checks):
            return f"the interruption changed nothing, to the bit {took}"
        return f"the interruption changed nothing that is promised {took}: {self.promise.why}"

    @property
    def holds(self) -> bool:
        """Whether all that is promised is so."""
        return all(check.holds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = asdict(self)
        told["run"], told["folder"] = str(self.run), None if self.folder is None else str(self.folder)
        for check, of in zip(told["checks"], self.checks, strict=True):
            check["holds"] = of.holds
        return {"holds": self.holds, **told}
