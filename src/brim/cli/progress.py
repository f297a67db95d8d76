"""What a person sees while a run goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from brim.cli.event_lines import event_line
from brim.train.observer import Record
from brim.units import format_bytes, format_seconds

_SECONDS_BETWEEN_LINES = 10.0
_REDRAWS_PER_S = 2  # rich's 10 cost 1.2% of a core, taken from the training
_SMOOTHING = 0.9  # share of the past in the loss and the speed that are shown


class TrainProgress:
    """Loss, tokens a second, memory and remaining time of a training run."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, highlight=False)
        self._bar: Progress | None = None
        self._loss = self._tokens_per_s = 0.0
        self._tokens: int | None = None  # so far; None where a resumed run has not told yet
        self._steps_here = self._samples_here = self._total_samples = 0
        self._of_steps = ""
        self._started = self._last_line = 0.0

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        # Steps are of different sizes where the batch moves: what is left is counted in samples.
        self._total_samples = total_samples
        self._of_steps = "" if total_steps is None else f"/{total_steps:,}"
        self._tokens = 0 if first_step == 0 else None
        self._started = self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.fields[step]}"),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._console,
                refresh_per_second=_REDRAWS_PER_S,
            )
            self._task = self._bar.add_task("", total=total_samples, step=f"{first_step:,}{self._of_steps}")
            self._bar.start()

    def write(self, record: Record) -> None:
        if record.get("split") == "train" and "learning_rate" in record:
            self._step(record)
        elif "split" in record:
            self._console.print(
                f"step {record['step']:,}  {record['split']}: loss {record['loss']:.4f}, "
                f"perplexity {record['perplexity']:.3f}, token accuracy {record['token_accuracy']:.4f}"
            )
        else:
            line = event_line(record)
            if line is not None:
                self._console.print(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _step(self, record: Record) -> None:
        self._loss = record["loss"] + (_SMOOTHING if self._steps_here else 0.0) * (self._loss - record["loss"])
        speed = ""
        if self._tokens is not None:
            tokens_per_s = (record["num_tokens"] - self._tokens) / record["seconds"]
            keep = _SMOOTHING if self._steps_here > 1 else 0.0  # the first step is slower than all others
            self._tokens_per_s = tokens_per_s + keep * (self._tokens_per_s - tokens_per_s)
            speed = f"  {self._tokens_per_s:,.0f} tokens/s"
        self._tokens = record["num_tokens"]
        self._steps_here += 1
        self._samples_here += record["effective_batch_size"]
        step = f"{record['step']:,}{self._of_steps}"
        text = f"loss {self._loss:.4f}{speed}  {format_bytes(record['peak_bytes'])}"
        if self._bar is not None:
            if self._steps_here == 1:  # what earlier sessions did took no time here
                self._bar.reset(self._task, completed=record["num_samples"] - record["effective_batch_size"], step=step)
            self._bar.update(self._task, completed=record["num_samples"], description=text, step=step)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            samples_left = self._total_samples - record["num_samples"]
            left_s = (self._last_line - self._started) / self._samples_here * samples_left
            self._console.print(f"step {step}  {text}  {format_seconds(left_s)} left")


class RowProgress:
    """Rows done so far; silent where there is no terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._bar = Progress(
            TextColumn("{task.completed:,.0f} rows"),
            TimeElapsedColumn(),
            console=Console(file=stream),
            disable=not Console(file=stream).is_terminal,
            transient=True,
        )

    def __enter__(self) -> RowProgress:
        self._bar.start()
        self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, num_rows: int) -> None:
        """So many more rows are done."""
        self._bar.advance(self._task, num_rows)
