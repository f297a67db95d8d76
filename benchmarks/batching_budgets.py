"""Check that losses are the same on any memory: under real limits, and with a memory model that promises too much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.batching_epoch import largest_difference
from benchmarks.batching_run import Outcome, RunFailed, Spec, run
from benchmarks.batching_subject import Method

SHARES: Mapping[str, float] = {"100%": 1.0, "50%": 0.5, "25%": 0.25}
SMALLEST = "one row"
# CONTRACT.md, "What equals what"; on a GPU arithmetic is in bf16.
GOALS: Mapping[Method, float] = {"lora": 1e-5, "full": 1e-4}
BF16_GOAL = 1e-2
WRONG_BY = 0.5
MOST_OUT_OF_MEMORY = 5  # events, with the wrong model

# The largest micro-batches that fit, so that a limit binds: the fastest ones are small on a CPU whatever there is.
_TRAINER = {"use_maximum_batch_size": True}
# glibc's heap keeps much of what is freed. Mapped by itself, every tensor goes back, and what is taken is what lives.
# For the run without a limit alone: under one, brim sees to this by itself.
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_REFUSALS = ("InputError", "ConfigError")  # what brim raises before it trains
_STEP_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRun:
    """Hold one epoch under a limit, against the one without."""

    method: Method
    limit: str
    limit_bytes: int | None  # of the process's address space; on a GPU, of what PyTorch may allocate
    tensor_bytes: int  # of it for the model's passes; without a limit what they take
    num_micro_batches: int | None  # of all updates
    num_out_of_memory: int | None
    num_probes_out_of_memory: int | None  # before the first step
    num_updates: int
    loss_difference: float | None  # the largest relative one of an update; None: it did not end
    goal: float
    most_out_of_memory: int
    wrong_by: float | None = None
    failure: str | None = None

    @property
    def is_met(self) -> bool:
        """Tell whether it ended with the promised losses, and memory ran out no more often than it may."""
        num_times = (self.num_out_of_memory or 0) + (self.num_probes_out_of_memory or 0)
        is_close = self.loss_difference is not None and self.loss_difference <= self.goal
        return is_close and num_times <= self.most_out_of_memory


def budget_runs(
    spec: Spec, method: Method, *, say: Callable[[str], None], start: Callable[[Spec], Outcome] = run
) -> list[BudgetRun]:
    """Run under all limits, and with the wrong model under the limit of 50%.

    A limit is what the process takes before the model's passes, and a share of what these took without a limit.
    """
    spec = replace(spec, method=method, trainer=dict(_TRAINER))
    free = start(replace(spec, environment=dict(_MAPPED)))
    runs = [_judged(spec, "none", free.passes_bytes, free, free)]
    say(_line(runs[-1]))
    for name, share in SHARES.items():
        allowed = int(share * free.passes_bytes)
        limited = _limited(spec, free.beside_bytes, allowed)
        for wrong_by in (None, WRONG_BY) if share < 1 else (None,):
            runs.append(_tried(replace(limited, wrong_by=wrong_by), name, allowed, free, start))
            say(_line(runs[-1]))
    runs.append(_smallest(spec, free, start))
    say(_line(runs[-1]))
    return runs


def _limited(spec: Spec, beside: int, allowed: int) -> Spec:
    """On a CPU brim finds the limit by itself; on a GPU it is said, since what one process may take is not asked."""
    if spec.device == "cpu":
        return replace(spec, limit_bytes=beside + allowed)
    return replace(spec, limit_bytes=allowed, memory={"budget": f"{beside + allowed} B"})


def _smallest(spec: Spec, free: Outcome, start: Callable[[Spec], Outcome]) -> BudgetRun:
    """Return the least limit, to within a few MiB, at which brim does not refuse the longest row."""
    refused, taken, smallest = 0, free.passes_bytes, None
    while taken - refused > _STEP_BYTES:
        allowed = (refused + taken) // 2
        tried = _tried(_limited(spec, free.beside_bytes, allowed), SMALLEST, allowed, free, start)
        if tried.failure is not None and any(error in tried.failure for error in _REFUSALS):
            refused = allowed
        else:
            taken, smallest = allowed, tried
    assert smallest is not None, "brim refused all that the run without a limit took"
    return smallest


def _tried(spec: Spec, limit: str, tensor_bytes: int, free: Outcome, start: Callable[[Spec], Outcome]) -> BudgetRun:
    try:
        return _judged(spec, limit, tensor_bytes, start(spec), free)
    except RunFailed as error:
        return _judged(spec, limit, tensor_bytes, None, free, failure=str(error))


def _judged(
    spec: Spec, limit: str, tensor_bytes: int, outcome: Outcome | None, free: Outcome, *, failure: str | None = None
) -> BudgetRun:
    return BudgetRun(
        method=spec.method,
        limit=limit,
        limit_bytes=spec.limit_bytes,
        tensor_bytes=tensor_bytes,
        num_micro_batches=outcome.num_micro_batches if outcome else None,
        num_out_of_memory=outcome.num_out_of_memory if outcome else None,
        num_probes_out_of_memory=_failed_probes(outcome) if outcome else None,
        num_updates=len(outcome.losses if outcome else []),
        loss_difference=largest_difference(outcome.losses, free.losses) if outcome else None,
        goal=GOALS[spec.method] if spec.device == "cpu" else BF16_GOAL,
        most_out_of_memory=0 if spec.wrong_by is None else MOST_OUT_OF_MEMORY,
        wrong_by=spec.wrong_by,
        failure=failure,
    )


def _failed_probes(outcome: Outcome) -> int:
    assert outcome.plan is not None, "brim's runs have one"
    return sum(probe["outcome"] == "out_of_memory" for probe in outcome.plan["launch"]["probes"])


def _line(found: BudgetRun) -> str:
    wrong = "" if found.wrong_by is None else f", promised ×{1 / found.wrong_by:g}"
    told = found.failure or (
        f"{found.num_micro_batches} micro-batches, {found.num_out_of_memory} times out of memory "
        f"and {found.num_probes_out_of_memory} before, losses within {found.loss_difference:.1e}"
    )
    return f"  {found.method}, limit {found.limit}{wrong}: {told}"
