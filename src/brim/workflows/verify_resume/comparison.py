"""Compare an undisturbed and a disturbed run: their logs, the model's inputs, their last checkpoints.

CONTRACT.md, "What equals what", says what is guaranteed for a run that was interrupted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from brim.train import RunFolder
from brim.train.checkpoints import mapped
from brim.units import format_count, format_seconds
from brim.workflows.runs import flat, json_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeProof:
    """Hold what was tried, and how the two runs compare."""

    run: Path
    device: str
    num_processes: int  # that trained together
    precision: str
    checkpoint_step: int  # whose checkpoint of the run it began with; 0: none, from the start
    start_step: int  # the last one that the undisturbed and the disturbed run share
    num_steps: int  # that each of them made
    effective_batch_sizes: tuple[int, ...]
    stopped_after: int | None  # the step in which Ctrl-C came
    killed_in: int  # the step in which SIGKILL came
    killed_where: str
    promise: Promise
    checks: tuple[Check, ...]
    own_log: str  # how the run's own log compares, which nothing guarantees
    seconds: float
    folder: Path | None  # of the two runs, where they are kept

    def __repr__(self) -> str:
        first, last = self.start_step + 1, self.start_step + self.num_steps
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        checks = (f"\n  {check.name}: {check.found}" for check in self.checks)
        return f"ResumeProof: {steps} of {self.run}: {self.verdict}{''.join(checks)}"

    @property
    def verdict(self) -> str:
        """Say in a sentence whether the guarantee is kept."""
        took = f"({format_seconds(self.seconds)})"
        if not self.holds:
            names = ", ".join(check.name for check in self.checks if not check.holds)
            return f"the interruption changed what it must not: {names} {took}"
        if all(check.difference is None for check in self.checks):
            return f"the interruption changed nothing, to the bit {took}"
        return f"the interruption changed nothing that is promised {took}: {self.promise.why}"

    @property
    def holds(self) -> bool:
        """Return whether all that is guaranteed holds."""
        return all(check.holds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        told = asdict(self)
        told["run"], told["folder"] = str(self.run), None if self.folder is None else str(self.folder)
        for check, of in zip(told["checks"], self.checks, strict=True):
            check["holds"] = of.holds
        return {"holds": self.holds, **told}


Kind: TypeAlias = Literal["plan", "cut", "figure", "state", "other"]


Record: TypeAlias = Mapping[str, Any]


_STEP_FIELDS: Mapping[str, tuple[str, Kind]] = {
    "num_samples": ("rows", "plan"),
    "num_tokens": ("rows", "plan"),
    "num_supervised_tokens": ("rows", "plan"),
    "effective_batch_size": ("batch sizes", "plan"),
    "num_micro_batches": ("micro-batches", "cut"),
    "learning_rate": ("learning rates", "plan"),
    "loss": ("losses", "figure"),
}


_TIMED = ("seconds", "peak_bytes", "busy")


_FILES = {"model": "weights", "optimizer": "optimizer", "random": "random states"}


_OUT_OF_MEMORY = ("oom", "replay")


_NO_STATE = ("logs",)  # it has the digest of a log with times in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Say where two values first differ, and how much all of them do."""

    where: str
    undisturbed: str
    disturbed: str
    num: int  # values that differ
    max_abs: float | None  # None: not numbers
    relative: float | None  # the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Compare one kind of thing."""

    name: str
    compared: str  # how much of it
    promise: Kept
    tolerance: float = 0.0  # relative; of what is to be close
    difference: Difference | None

    @property
    def found(self) -> str:
        """Return how large the difference is, in words."""
        if self.difference is None:
            return "equal"
        if self.difference.relative is None:
            return "different"
        if math.isfinite(self.difference.relative):
            return f"differs by {self.difference.relative:.1g} of its size"
        return f"differs by {self.difference.max_abs:.1g}"

    @property
    def holds(self) -> bool:
        """Return whether what is guaranteed for it holds."""
        if self.difference is None or self.promise == "open":
            return True
        size = self.difference.relative
        return self.promise == "close" and size is not None and size <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Hold a run that was made for the comparison."""

    run: RunFolder
    tokens: Mapping[int, frozenset[str]]  # digests of what the model was given, by step; more than one is a difference
    last_step: int


def records_of(run: RunFolder, *, after: int = 0, upto: float = math.inf) -> list[Record]:
    """Return the log's lines on these steps, without those on checkpoints."""
    records = [record for record in json_lines(run.metrics) if isinstance(record.get("step"), int)]
    return [each for each in records if after < each["step"] <= upto and each.get("event") != "checkpoint"]


def ran_out_of_memory(records: Iterable[Record]) -> bool:
    """Return whether a step was partitioned otherwise than planned."""
    return any(record.get("event") in _OUT_OF_MEMORY for record in records)


def compared(undisturbed: Made, disturbed: Made, promise: Promise, *, after: int) -> list[Check]:
    """Compare all that the two have in common, from the step after `after` on."""
    upto = undisturbed.last_step
    ours, theirs = (records_of(made.run, after=after, upto=upto) for made in (undisturbed, disturbed))
    checks = [*compared_logs(ours, theirs, promise, given=_given(undisturbed, disturbed, promise, after=after))]
    folders = [made.run.checkpoints / f"step-{upto:08d}" for made in (undisturbed, disturbed)]
    for name, title in _FILES.items():
        left, right = (mapped(folder, name) for folder in folders)
        checks.append(_compared_tensors(title, left, right, promise))
    numbers = [_numbers_of(folder / "state.json") for folder in folders]
    checks.append(_check("counters", f"{len(numbers[0]):,} values", numbers[0], numbers[1], promise, kind="state"))
    return checks


def compared_logs(
    ours: Sequence[Record], theirs: Sequence[Record], promise: Promise, *, given: Sequence[Mapping[str, Any]] = ({}, {})
) -> Iterator[Check]:
    """Compare two logs. given: the model's inputs by their place, of each run."""
    kinds: dict[str, Kind] = dict(_STEP_FIELDS.values())
    sides: list[dict[str, dict[str, Any]]] = [{"rows": dict(each)} for each in given]
    for side, records in zip(sides, (ours, theirs), strict=True):
        for title, kind, where, value in _values(records):
            kinds.setdefault(title, kind)
            side.setdefault(title, {})[where] = value
    num_steps = sum("learning_rate" in record for record in ours)
    for title, kind in kinds.items():
        left, right = (side.get(title, {}) for side in sides)
        amount = (
            format_count(num_steps, "step")
            if title in dict(_STEP_FIELDS.values())
            else format_count(len(left), "figure")
        )
        yield _check(title, amount, left, right, promise, kind=kind)


def _given(undisturbed: Made, disturbed: Made, promise: Promise, *, after: int) -> list[dict[str, Any]]:
    """Return digests of the inputs by step; none where padding differs, since other micro-batches were taken."""
    if not promise.same_cut:
        return [{}, {}]
    return [
        {f"tokens of step {step:,}": digests for step, digests in made.tokens.items() if step > after}
        for made in (undisturbed, disturbed)
    ]


def _values(records: Sequence[Record]) -> Iterator[tuple[str, Kind, str, Any]]:
    """Yield title, kind, place and value of each figure."""
    seen: dict[tuple[int, str], int] = {}
    for record in records:
        label = str(record.get("event") or record.get("split"))
        is_step = "learning_rate" in record
        nth = seen[record["step"], label] = seen.get((record["step"], label), 0) + 1
        for name, value in record.items():
            if name in ("step", "split", "event", *_TIMED):
                continue
            place = f"step {record['step']:,}" + ("" if nth == 1 else f" ({nth})")
            if is_step and name in _STEP_FIELDS:
                title, kind = _STEP_FIELDS[name]
                yield title, kind, place if kind != "plan" or title != "rows" else f"{name} of {place}", value
            elif label == "schedule":
                yield "batch sizes", "plan", f"{name} of {place}", value
            elif not is_step and "loss" in record and "perplexity" in record:
                yield "evaluations", "figure", f"{label} {name} after {place}", value
            else:
                yield "other records", "other", f"{'' if is_step else label + ' '}{name} of {place}", value


def _check(
    title: str, amount: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], promise: Promise, *, kind: Kind
) -> Check:
    places = [place for place in {**ours, **theirs} if not _same(ours, theirs, place)]
    difference = None
    if places:
        sizes = [_sizes(ours.get(place), theirs.get(place)) for place in places]
        known = [size for size in sizes if size is not None]
        are_numbers = len(known) == len(sizes)
        difference = Difference(
            where=places[0],
            undisturbed=_shown(ours.get(places[0])),
            disturbed=_shown(theirs.get(places[0])),
            num=len(places),
            max_abs=max(size for size, _ in known) if are_numbers else None,
            relative=max(size for _, size in known) if are_numbers else None,
        )
    return Check(
        name=title,
        compared=amount,
        promise=promise.of(kind),
        tolerance=promise.loss_tolerance if promise.of(kind) == "close" else 0.0,
        difference=difference,
    )


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any], place: str) -> bool:
    return place in ours and place in theirs and ours[place] == theirs[place]


def _sizes(left: Any, right: Any) -> tuple[float, float] | None:
    """Return the absolute and the relative difference; None where these are not two numbers."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (left, right)):
        return None
    size = abs(left - right)
    return size, size / abs(left) if left else math.inf


def _compared_tensors(title: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor], promise: Promise) -> Check:
    names = sorted({*left, *right})
    wrong = [each for each in (_of_tensor(left, right, name) for name in names) if each is not None]
    amount, difference = format_count(len(names), "tensor"), _largest(wrong) if wrong else None
    return Check(name=title, compared=amount, promise=promise.of("state"), difference=difference)


def _of_tensor(left: Mapping[str, Tensor], right: Mapping[str, Tensor], name: str) -> Difference | None:
    """Compare one tensor, so that one at a time is in memory."""
    there = ["a tensor" if name in side else "nothing" for side in (left, right)]
    if "nothing" in there:
        return Difference(where=name, undisturbed=there[0], disturbed=there[1], num=1, max_abs=None, relative=None)
    return tensor_difference(name, left[name], right[name])


def tensor_difference(name: str, ours: Tensor, theirs: Tensor) -> Difference | None:
    """Return None where all bits are equal; zeros of either sign and kinds of NaN are not."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        told = [f"{tuple(each.shape)} {each.dtype}" for each in (ours, theirs)]
        return Difference(where=name, undisturbed=told[0], disturbed=told[1], num=1, max_abs=None, relative=None)
    ours, theirs = ours.contiguous().reshape(-1), theirs.contiguous().reshape(-1)
    size = ours.element_size()
    unequal = (ours.view(torch.uint8) != theirs.view(torch.uint8)).view(ours.numel(), size).any(dim=1)
    if not unequal.any():
        return None
    first, has_size = int(unequal.nonzero()[0]), ours.dtype != torch.uint8  # bytes, as of a generator, are not numbers
    left, right = ours.double(), theirs.double()
    max_abs, most = float((left - right).abs().max()), float(left.abs().max())
    return Difference(
        where=f"{name}[{first}]",
        undisturbed=f"{float(left[first]):.9g}",
        disturbed=f"{float(right[first]):.9g}",
        num=int(unequal.sum()),
        max_abs=max_abs if has_size else None,
        relative=None if not has_size else max_abs / most if most else math.inf,
    )


def _largest(wrong: Sequence[Difference]) -> Difference:
    """Return the first difference's place with the largest sizes of all."""
    first, sizes = wrong[0], [(each.max_abs, each.relative) for each in wrong]
    known = [(size, relative) for size, relative in sizes if size is not None and relative is not None]
    return Difference(
        where=first.where,
        undisturbed=first.undisturbed,
        disturbed=first.disturbed,
        num=sum(each.num for each in wrong),
        max_abs=max((size for size, _ in known), default=None),
        relative=max((relative for _, relative in known), default=None),
    )


def _numbers_of(file: Path) -> dict[str, Any]:
    """Return what a checkpoint keeps beside tensors, without what has times in it."""
    state = json.loads(file.read_text(encoding="utf-8"))
    return flat({key: value for key, value in state.items() if key not in _NO_STATE})


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, frozenset):
        return ", ".join(sorted(digest[:12] for digest in value))
    return repr(value) if isinstance(value, float) else str(value)


Kept = Literal["bits", "close", "open"]  # equal to the bit; within a tolerance; nothing is guaranteed


# Relative, of the losses of a sequence of steps.
_LOSS_FP32_LINEAR = 1e-5  # LoRA or SGD


_LOSS_FP32_ADAM = 1e-4  # near-zero second moments amplify the last bits


_LOSS_LOW_PRECISION = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Say what must be equal: a guarantee for each kind of thing."""

    states: Kept  # weights, optimizer, random states
    figures: Kept  # losses and evaluations
    loss_tolerance: float  # relative; 0 where figures are equal to the bit
    same_cut: bool  # a step has the same micro-batches
    why: str

    def of(self, kind: Literal["plan", "cut", "figure", "state", "other"]) -> Kept:
        """Return the guarantee for a kind. plan: rows, sizes and learning rates, which are equal everywhere."""
        if kind == "plan":
            return "bits"
        if kind == "cut":
            return "bits" if self.same_cut else "open"
        if kind == "figure":
            return self.figures
        return self.states


def promise_of(settings: Mapping[str, Any], *, device: str, ran_out_of_memory: bool) -> Promise:
    """Return the guarantee. settings: the run's resolved configuration. device: its name; "cpu" for a CPU."""
    same_cut = not ran_out_of_memory
    if device == "cpu" and same_cut:
        return Promise(states="bits", figures="bits", loss_tolerance=0.0, same_cut=True, why="on a CPU, with one plan")
    why = "memory ran out, and a step was partitioned otherwise" if ran_out_of_memory else f"on {device}, not on a CPU"
    if ran_out_of_memory and _drops_by_batch(settings):
        return Promise(
            states="open", figures="open", loss_tolerance=0.0, same_cut=False, why=f"{why}; dropout is drawn by batch"
        )
    return Promise(states="open", figures="close", loss_tolerance=_tolerance(settings), same_cut=same_cut, why=why)


def _tolerance(settings: Mapping[str, Any]) -> float:
    optimizer = settings["trainer"]["optimizer"]["type"]
    if settings["precision"] != "fp32" or settings.get("quantization") or "8bit" in optimizer:
        return _LOSS_LOW_PRECISION
    return _LOSS_FP32_LINEAR if settings.get("adapter") or optimizer.startswith("sgd") else _LOSS_FP32_ADAM


def _drops_by_batch(settings: Mapping[str, Any]) -> bool:
    """Return whether an adapter's dropout depends on the micro-batch. A base's own dropout is not in the settings."""
    adapter = settings.get("adapter") or {}
    return bool(adapter.get("dropout")) and not settings["trainer"]["dropout_by_row"]


def step_sizes(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the rows of each step; one that was skipped logs none, and counts as many as the step before."""
    sizes: list[int] = []
    for record in steps:
        sizes.append(record.get("effective_batch_size", sizes[-1] if sizes else 0))
    return sizes


def is_step(record: Mapping[str, Any]) -> bool:
    """Return whether a line is of a step, be it one that was skipped."""
    return "learning_rate" in record or record.get("event") == "skipped"
