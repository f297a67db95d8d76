"""Run cases until time is up, write what each gave at once, and say in the end whether all is well."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_gpu import cuda_facts
from benchmarks.report import command, write_report

Figures = dict[str, Any]


class Skip(Exception):
    """Leave a case out, and say why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold one check: what it does, and what its figures must be."""

    name: str
    run: Callable[[], Figures]  # raises Skip
    passes: Callable[[Figures], bool] = bool
    expects: str = "nothing"  # what `passes` asks for, in words
    needs_s: float = 10  # of the budget, else it is not begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hold what is checked, where, and until when."""

    part: str
    device: torch.device
    small: bool
    only: str  # part of a case's name
    budget_s: float
    until: float  # of time.monotonic
    out: Path
    command: str

    @classmethod
    def of(cls, *, device: str, budget_s: float, arguments: Sequence[str], **others: Any) -> Options:
        """Let the time begin."""
        return cls(
            device=torch.device(device),
            budget_s=budget_s,
            until=time.monotonic() + budget_s,
            command=command("gpu", arguments),
            **others,
        )

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()


def run_cases(cases: Iterable[Case], options: Options) -> bool:
    """Return whether at least one case passed and none failed. The report is written after each."""
    told: list[Figures] = []
    for case in cases:
        if options.only not in case.name:
            continue
        outcome = _outcome(case, options)
        told.append({"name": case.name, "expects": case.expects, **outcome})
        reason = outcome.get("reason") or _short(outcome.get("figures", {}))
        print(f"{outcome['outcome']:8} {case.name}: {reason}", flush=True)
        _write(told, options)
    verdict = _verdict(told)
    _write(told, options)
    print(f"{options.part}: {verdict}")
    return verdict.startswith("passed")


def _outcome(case: Case, options: Options) -> Figures:
    if options.left_s < case.needs_s:
        return {"outcome": "skipped", "reason": f"{case.needs_s:.0f} s are not left"}
    started = time.monotonic()
    try:
        figures = case.run()
    except Skip as skip:
        return {"outcome": "skipped", "reason": str(skip)}
    except Exception as error:  # whatever a case raises is its result, and the next one runs
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        free()
    outcome = "passed" if case.passes(figures) else "failed"
    return {"outcome": outcome, "seconds": round(time.monotonic() - started, 2), "figures": figures}


def free() -> None:
    """Give back what nothing holds any more, so that a case does not see those before it."""
    gc.collect()
    if _has_context():
        torch.cuda.empty_cache()


def _has_context() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _verdict(told: Sequence[Figures]) -> str:
    counts = Counter(each["outcome"] for each in told)
    word = "FAILED" if counts["failed"] else "passed" if counts["passed"] else "NOTHING RAN"
    return f"{word} ({', '.join(f'{number} {outcome}' for outcome, number in sorted(counts.items()))})"


def _write(told: Sequence[Figures], options: Options) -> None:
    # A context of this process would lie on the device beside what the processes of `memory` measure.
    figures: Mapping[str, Any] = {
        "command": options.command,
        "device": cuda_facts(str(options.device)) if _has_context() else {"name": options.device.type},
        "small": options.small,
        "verdict": _verdict(told),
        "cases": told,
    }
    write_report(f"gpu_{options.part}", figures=figures, num_threads=torch.get_num_threads(), folder=options.out)


def _short(figures: Figures) -> str:
    """Put the plain figures into one line."""
    plain = {name: value for name, value in figures.items() if isinstance(value, (int, float, str))}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in plain.items()
    )


def require_liger(options: Options) -> None:
    """Skip the case where Liger's kernels cannot run."""
    if not options.is_cuda or importlib.util.find_spec("liger_kernel") is None:
        raise Skip("liger_kernel is not installed" if options.is_cuda else "Liger's kernels need a CUDA device")
