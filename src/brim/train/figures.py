"""Read a run's figures: what an observer hears while it goes on, and what a finished run's metrics.jsonl holds.

An `Observer` is the interface between the loop and its logs and displays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from brim.errors import InputError, Problem

if TYPE_CHECKING:
    import pandas as pd

Record = Mapping[str, Any]  # one line of metrics.jsonl; its fields stand in docs/run-folder.md


class Observer(Protocol):
    """Hear what happens in a run: `start` once, `write` for each record in order, `close` at the end.

    A class of your own that inherits from this one needs only the methods that it is interested in. They are called in
    the thread that trains, between steps, which wait for them; what they raise ends the run.
    """

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        """Prepare for the steps after `first_step`, which is 0 unless the run is continued.

        total_steps: of the run; None where the effective batch follows what is measured. total_samples: rows that the
        whole run consumes, counted with repetition.
        """

    def write(self, record: Record) -> None:
        """Take the record of a step, an evaluation or an event: a line of metrics.jsonl (docs/run-folder.md)."""

    def close(self) -> None:
        """Close what was opened: the run has ended, well or not; also where it failed after `start`."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Join several observers to one. Raises InputError for what is not an observer, such as a function."""

    members: Sequence[Observer]

    def __post_init__(self) -> None:
        for member in self.members:
            missing = [name for name in ("start", "write", "close") if not callable(getattr(member, name, None))]
            if missing or isinstance(member, type):
                raise InputError(_no_observer(member, missing))

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        for member in self.members:
            member.start(first_step=first_step, total_steps=total_steps, total_samples=total_samples)

    def write(self, record: Record) -> None:
        for member in self.members:
            member.write(record)

    def close(self) -> None:
        """Close all of them, even where one raises."""
        with ExitStack() as stack:
            for member in reversed(self.members):
                stack.callback(member.close)


def _no_observer(given: object, missing: Sequence[str]) -> Problem:
    name = getattr(given, "__name__", None) or f"of the type {type(given).__name__}"
    kind = "the class " if isinstance(given, type) else ""
    lacks = f": it has no method {', '.join(missing)}" if missing else ""
    return Problem(
        what=f"the observer is {kind}{name}, which cannot hear a run{lacks}",
        expected="an object of a class that inherits from brim.Observer",
        fix="write a class with the methods that you need, and give an object of it: observer=MyObserver()",
    )


MOST_POINTS = 200  # of a curve


_LAST_SHARE = 0.1  # of the tokens, whose training loss stands for the end's: one step's is mostly the luck of its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Hold a loss over tokens."""

    tokens: tuple[int, ...]  # trained on until then
    loss: tuple[float, ...]  # mean over supervised tokens: of the training since the point before, or of an evaluation
    weights: tuple[int, ...]  # supervised tokens of each

    def binned(self, num_bins: int) -> Curve:
        """Return the curve in stretches of equally many tokens, each with its mean over supervised tokens.

        A point belongs to the stretch that holds the middle of its tokens. No more points come out than went in.
        """
        if len(self.tokens) <= num_bins or not self.tokens:
            return self
        width = self.tokens[-1] / num_bins
        bins: dict[int, list[int]] = {}
        for position, (start, end) in enumerate(zip((0, *self.tokens), self.tokens, strict=False)):
            bins.setdefault(min(int((start + end) / 2 / width), num_bins - 1), []).append(position)
        groups = [bins[number] for number in sorted(bins)]
        return Curve(
            tokens=tuple(self.tokens[group[-1]] for group in groups),
            loss=tuple(self.mean(group) for group in groups),
            weights=tuple(sum(self.weights[position] for position in group) for group in groups),
        )

    def mean(self, positions: Sequence[int]) -> float:
        """Return the mean loss of these points over their supervised tokens."""
        total = math.fsum(self.loss[position] * self.weights[position] for position in positions)
        return total / sum(self.weights[position] for position in positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Describe a run in figures. Losses are in nats per supervised token, of the weights at the end."""

    losses: Mapping[str, float]  # train (its last tenth), and validation and test where they were evaluated
    evaluated_tokens: Mapping[str, int]  # supervised tokens of the evaluated splits
    num_steps: int
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int
    num_skipped: int  # steps without an update, since their loss or gradient was not finite
    seconds: float  # of all steps, without evaluations and checkpoints
    peak_bytes: int  # the most of any step
    train_curve: Curve
    validation_curve: Curve

    @classmethod
    def of(cls, metrics: Path) -> RunFigures:
        """Read the figures of a finished run. Raises OSError, or ValueError for a file that is not such a log."""
        with metrics.open(encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        steps = [record for record in records if is_step(record)]
        if not steps:
            raise ValueError("there is no step in it")
        taken = [record for record in records if is_step(record) or record.get("event") == "skipped"]
        tokens = {record["step"]: record["num_tokens"] for record in taken}
        evaluated = {
            split: [each for each in records if each.get("split") == split] for split in ("validation", "test")
        }
        last = {split: found[-1] for split, found in evaluated.items() if found}
        validated = evaluated["validation"]
        points = _points(taken)
        return cls(
            losses={"train": _last_loss(points), **{split: _number(record["loss"]) for split, record in last.items()}},
            evaluated_tokens={split: int(record["num_supervised_tokens"]) for split, record in last.items()},
            num_steps=max(record["step"] for record in records),
            num_samples=taken[-1]["num_samples"],
            num_tokens=taken[-1]["num_tokens"],
            num_supervised_tokens=taken[-1]["num_supervised_tokens"],
            num_skipped=sum(record.get("event") == "skipped" for record in records),
            seconds=math.fsum(record["seconds"] for record in steps),
            peak_bytes=max(record["peak_bytes"] for record in steps),
            train_curve=points.binned(MOST_POINTS),
            validation_curve=_every(
                Curve(
                    tokens=tuple(tokens.get(record["step"], taken[-1]["num_tokens"]) for record in validated),
                    loss=tuple(_number(record["loss"]) for record in validated),
                    weights=tuple(int(record["num_supervised_tokens"]) for record in validated),
                )
            ),
        )

    def as_json(self) -> dict[str, Any]:
        losses = {split: loss if math.isfinite(loss) else None for split, loss in self.losses.items()}
        return {**asdict(self), "losses": losses}

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> RunFigures:
        """Read what `as_json` gave. Raises KeyError or TypeError for anything else."""
        curves = {
            name: Curve(**{key: tuple(given[name][key]) for key in ("tokens", "loss", "weights")}) for name in _CURVES
        }
        losses = {split: math.nan if loss is None else float(loss) for split, loss in given["losses"].items()}
        return cls(**{**given, **curves, "losses": losses})


_CURVES = ("train_curve", "validation_curve")


def history(metrics: Path) -> pd.DataFrame:
    """Return the steps and evaluations of a run, a row each, in the order of its metrics.jsonl.

    The columns are its fields (docs/run-folder.md); a field that a line does not have is NaN. Events have no row, but
    for `evaluation`, which tells those of the training rows from steps.
    Raises InputError where the file cannot be read, or is not such a log.
    """
    try:
        with metrics.open(encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        kept = [record for record in records if "split" in record]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            what=f"the run's history cannot be read: {error}",
            where=str(metrics),
            expected="the file as the run wrote it",
            fix="look whether the run's folder was moved, deleted or changed",
        ) from error
    import pandas as pd  # here, since a prediction of memory imports this module and no frame

    frame: pd.DataFrame = pd.DataFrame(kept)
    return frame


def is_step(record: Mapping[str, Any]) -> bool:
    """Say whether it is the line of a step that updated the weights."""
    return record.get("split") == "train" and "learning_rate" in record


def _points(taken: Iterable[Mapping[str, Any]]) -> Curve:
    """Return a point for each step that has a loss; one that was left out consumed its tokens all the same."""
    tokens, losses, weights, before = [], [], [], 0
    for record in taken:
        weight, before = record["num_supervised_tokens"] - before, record["num_supervised_tokens"]
        if record.get("loss") is not None:
            tokens.append(record["num_tokens"])
            losses.append(float(record["loss"]))
            weights.append(weight)
    return Curve(tokens=tuple(tokens), loss=tuple(losses), weights=tuple(weights))


def _last_loss(points: Curve) -> float:
    """Return the mean over the steps in the last tenth of the tokens; over the last step at least."""
    if not points.tokens:
        return math.nan
    until = (1 - _LAST_SHARE) * points.tokens[-1]
    last = [position for position, tokens in enumerate(points.tokens) if tokens > until]
    return points.mean(last)


def _every(curve: Curve) -> Curve:
    """Keep at most MOST_POINTS evaluations, evenly spread, the last among them; those that are not finite go."""
    kept = [position for position, loss in enumerate(curve.loss) if math.isfinite(loss)]
    stride = max(-(-len(kept) // MOST_POINTS), 1)
    kept = kept[::-1][::stride][::-1]
    return Curve(
        tokens=tuple(curve.tokens[position] for position in kept),
        loss=tuple(curve.loss[position] for position in kept),
        weights=tuple(curve.weights[position] for position in kept),
    )


def _number(loss: float | None) -> float:
    return math.nan if loss is None else float(loss)
