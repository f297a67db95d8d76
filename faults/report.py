"""benchmarks/results/faults.json: how many trials of each kind passed, with machine, versions, command and date."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine, versions

from faults import Trial
from faults.catalogue import CATALOGUE

REPORT = RESULTS / "faults.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Trials of one row."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    told: tuple[str, ...] = ()  # of each that did not pass, what and why; reasons to skip once

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            passed=self.passed + other.passed,
            failed=self.failed + other.failed,
            skipped=self.skipped + other.skipped,
            told=tuple(dict.fromkeys([*self.told, *other.told])),
        )

    def __str__(self) -> str:
        return f"{self.passed:,} passed, {self.failed:,} failed, {self.skipped:,} skipped"


def counted(trials: Iterable[tuple[str, Trial]]) -> dict[str, Counts]:
    """By row."""
    counts: dict[str, Counts] = {}
    for _, trial in trials:
        told = {"passed": (), "failed": (f"failed: {trial.case}: {trial.why}",), "skipped": (f"skipped: {trial.why}",)}
        one = Counts(**{trial.outcome: 1}, told=told[trial.outcome])
        counts[trial.row] = counts.get(trial.row, Counts()) + one
    return counts


def write_report(
    counts: Mapping[str, Counts], *, names: Sequence[str], seed: int, seconds: float, num_workers: int
) -> None:
    """Write the counts of these faults; those of others stay as they were told before."""
    faults = read_report()["faults"] if REPORT.exists() else {}
    everything = len(names) == len(CATALOGUE)
    only = "" if everything else "".join(f" --only {name}" for name in names)
    how = {
        "command": f"python -m faults{only}{f' --seed {seed}' if seed else ''} --workers {num_workers}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": seconds,
        "machine": machine(),
        "versions": versions(),
    }
    for fault in CATALOGUE:
        if fault.name in names:
            rows = {row.name: _as_json(counts.get(row.name, Counts())) for row in fault.rows}
            faults[fault.name] = {"seed": seed, **how, "rows": rows}
    record = {"benchmark": "faults", "faults": {f.name: faults[f.name] for f in CATALOGUE if f.name in faults}}
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_report(path: Path = REPORT) -> dict[str, Any]:
    """What was written."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def _as_json(counts: Counts) -> dict[str, Any]:
    return {
        "passed": counts.passed,
        "failed": counts.failed,
        "skipped": counts.skipped,
        **({"told": list(counts.told)} if counts.told else {}),
    }
