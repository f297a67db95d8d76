"""Show what brim does while it works, on the command line and in Python: notes, status, steps, rows.

How far a run has come is a line that is rewritten on a terminal and in a notebook, and lines elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import IO, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from brim.errors import InputError
from brim.notes import PlanCard, Say, is_told, kind_of, wrapped
from brim.train import Observer, Record
from brim.units import format_bytes, format_count, format_seconds

_SECONDS_BETWEEN_LINES = 10.0


_REDRAWS_PER_S = 2  # rich's 10 cost 1.2% of a core, taken from the training


_SMOOTHING = 0.9  # share of the past in the loss and the speed that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Hold what the line shows."""

    head: str
    text: str = ""
    done: int = 0
    left_s: float | None = None  # for lines without a bar, which works it out by itself

    def __str__(self) -> str:
        left = "" if self.left_s is None else f"{format_seconds(self.left_s)} left"
        return "  ".join(filter(None, (self.head, self.text, left)))


class LiveLine:
    """Rewrite the last line of a terminal or of a notebook's cell; other lines are printed above it."""

    def __init__(self, stream: IO[str], *, in_notebook: bool = False) -> None:
        # rich's own display in notebooks needs ipywidgets; a carriage return does not, and works in every notebook.
        self._console = Console(file=stream, force_jupyter=False, highlight=False, markup=False, emoji=False)
        self._in_notebook = in_notebook
        self._is_terminal = self._console.is_terminal
        self._bar: _Bar | None = None
        self._width, self._last = 0, time.monotonic()

    @property
    def rewrites(self) -> bool:
        """Return whether there is a line that can be rewritten."""
        return self._in_notebook or self._is_terminal

    @property
    def width(self) -> int:
        """Return the columns of the terminal; 80 where there is none."""
        return self._console.width

    def print(self, text: str) -> None:
        """Print a line that stays."""
        self._wipe()
        self._console.print(text, soft_wrap=True)
        self._last = time.monotonic()

    def show(self, shown: Callable[[], Shown], *, total: int | None = None) -> None:
        """Replace the line; where it cannot be rewritten, print it, but only once every `_SECONDS_BETWEEN_LINES`.

        shown: is asked only for what is drawn, in another thread, too. total: adds a bar, and the time that is left.
        """
        if self._in_notebook:
            self._rewrite(shown)
        elif self._is_terminal:
            self._draw(shown, total)
        elif time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self.print(str(shown()))

    def clear(self) -> None:
        """Take the line away."""
        self._wipe()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _rewrite(self, shown: Callable[[], Shown]) -> None:
        now = time.monotonic()
        if self._width and now - self._last < 1 / _REDRAWS_PER_S:
            return
        text = str(shown())
        self._console.file.write(f"\r{text.ljust(self._width)}")
        self._console.file.flush()
        self._width, self._last = len(text), now

    def _wipe(self) -> None:
        if self._width:
            self._console.file.write(f"\r{' ' * self._width}\r")
            self._width = 0

    def _draw(self, shown: Callable[[], Shown], total: int | None) -> None:
        if self._bar is None or self._bar.total != total:
            self.clear()
            self._bar = _Bar(shown, total=total, console=self._console)
            self._bar.start()
        self._bar.shown = shown


class _Bar(Progress):
    """Ask for what it shows when it is drawn, `_REDRAWS_PER_S`, and not as often as there is something new."""

    def __init__(self, shown: Callable[[], Shown], *, total: int | None, console: Console) -> None:
        self.shown, self.total = shown, total
        self._drawn: Callable[[], Shown] | None = shown  # until there is a task
        columns = _columns(has_total=total is not None)
        super().__init__(*columns, console=console, refresh_per_second=_REDRAWS_PER_S, transient=True)
        self._task, self._drawn = self.add_task("", total=total, head=""), None

    def get_renderables(self) -> Iterable[RenderableType]:
        # At 0 so far, the first update sets the beginning of the speed: earlier sessions' steps do not count in it.
        if self._drawn is not self.shown:
            self._drawn = self.shown
            shown = self._drawn()
            self.update(self._task, completed=shown.done, description=shown.text, head=shown.head)
        return [_Line([column(task) for column in self.columns if not isinstance(column, str)]) for task in self.tasks]


@dataclass(frozen=True, slots=True)
class _Line:
    """Draw cells behind one another, the bar in what the others leave: rich's table takes three times as long."""

    cells: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        texts = [cell for cell in self.cells if isinstance(cell, Text)]
        left = options.max_width - sum(text.cell_len + 1 for text in texts)
        room = options.update(width=max(left, 0))
        line = Text(" ").join(cell if isinstance(cell, Text) else _drawn(cell, console, room) for cell in self.cells)
        line.truncate(options.max_width, overflow="ellipsis")
        yield from line.render(console)


def _drawn(bar: RenderableType, console: Console, room: ConsoleOptions) -> Text:
    """Return a bar at its full width: without colours, rich draws what is done of it alone."""
    drawn = Text.assemble(*((part.text, part.style or "") for part in console.render(bar, room)))
    drawn.pad_right(max(console.measure(bar, options=room).maximum - drawn.cell_len, 0))
    return drawn


def _columns(*, has_total: bool) -> tuple[ProgressColumn, ...]:
    head, text = TextColumn("{task.fields[head]}", markup=False), TextColumn("{task.description}", markup=False)
    if has_total:
        return head, BarColumn(bar_width=24), text, TimeRemainingColumn(), TextColumn("left")
    return SpinnerColumn(), head, text, TimeElapsedColumn()


class TrainProgress:
    """Show the loss, tokens a second, memory and remaining time of a training run."""

    def __init__(self, line: LiveLine) -> None:
        self._line = line

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        # Where the effective batch moves, steps differ in size: what is left is counted in samples.
        self._total_samples = total_samples
        self._of_steps = "" if total_steps is None else f"/{total_steps:,}"
        self._tokens: int | None = 0 if first_step == 0 else None  # so far; None in a resumed run before its first step
        self._loss = self._tokens_per_s = 0.0
        self._steps_here = self._samples_here = 0
        self._started = time.monotonic()
        self._line.clear()
        if self._line.rewrites:
            self._line.show(lambda: Shown(head=f"step {first_step:,}{self._of_steps}"))

    def write(self, record: Record) -> None:
        if record.get("split") == "train" and "learning_rate" in record:
            self._step(record)
        elif "split" in record:
            self._line.print(
                f"step {record['step']:,}  {record['split']}: loss {record['loss']:.4f}, "
                f"perplexity {record['perplexity']:.3f}, token accuracy {record['token_accuracy']:.4f}"
            )
        else:
            line = event_line(record)
            if line is not None:
                self._line.print(line)

    def close(self) -> None:
        self._line.clear()

    def _step(self, record: Record) -> None:
        self._loss = record["loss"] + (_SMOOTHING if self._steps_here else 0.0) * (self._loss - record["loss"])
        if self._tokens is not None:
            tokens_per_s = (record["num_tokens"] - self._tokens) / record["seconds"]
            keep = _SMOOTHING if self._steps_here > 1 else 0.0  # the first step is slower than all others
            self._tokens_per_s = tokens_per_s + keep * (self._tokens_per_s - tokens_per_s)
        self._tokens = record["num_tokens"]
        self._steps_here += 1
        self._samples_here += record["effective_batch_size"]
        left_s = (time.monotonic() - self._started) / self._samples_here * (self._total_samples - record["num_samples"])
        self._line.show(partial(self._shown, record, self._loss, self._tokens_per_s, left_s), total=self._total_samples)

    def _shown(self, record: Record, loss: float, tokens_per_s: float, left_s: float) -> Shown:
        speed = f"  {tokens_per_s:,.0f} tokens/s" if tokens_per_s else ""
        return Shown(
            head=f"step {record['step']:,}{self._of_steps}",
            text=f"loss {loss:.4f}{speed}  {format_bytes(record['peak_bytes'])}",
            done=record["num_samples"],
            left_s=left_s,
        )


class RowProgress:
    """Show what is being done, and how many of its rows are done."""

    def __init__(self, line: LiveLine) -> None:
        self._line, self._doing, self._num_rows = line, "", 0

    def begin(self, doing: str) -> None:
        """Begin another activity, of which no row is done yet."""
        self._doing, self._num_rows = doing, 0
        if self._line.rewrites:
            self._line.show(self._shown)

    def advance(self, num_rows: int) -> None:
        """Count so many more rows as done."""
        self._num_rows += num_rows
        self._line.show(self._shown)

    def _shown(self) -> Shown:
        rows = format_count(self._num_rows, "row") if self._num_rows else ""
        return Shown(head=self._doing, text=rows) if self._doing else Shown(head=rows)


def event_line(record: Record) -> str | None:
    """Return an event of a run as one line; None if it is not worth showing."""
    text = _text(record)
    return None if text is None else f"step {record['step']:,}  {text}"


def _text(record: Record) -> str | None:
    event = record["event"]
    if event in ("checkpoint", "point"):
        return None
    if event == "schedule":
        after = format_count(record["effective_batch_size"], "row")
        return f"effective batch: {record['before']:,} -> {after} ({record['reason']})"
    if event == "oom":
        return _out_of_memory(record)
    if event == "replay":
        return f"restarted in {format_count(record['num_micro_batches'], 'micro-batch', 'micro-batches')}"
    if event == "cap":
        return f"limit of a micro-batch: {_amount(record, 'before')} -> {_amount(record, 'after')}"
    return str(event)


def _out_of_memory(record: Record) -> str:
    """Say that memory ran out: for a micro-batch, for rows without gradients, or for something without rows."""
    where = f"memory ran out: {record['where']}"
    if "rows" not in record:
        return f"{where}; trying once more"
    text = f"{where}, {format_count(len(record['rows']), 'row')} of up to {record['padded_length']:,} tokens"
    if "rows_at_once" in record:
        return f"{text}; from now on {record['rows_at_once']:,} together"
    if "cap_bytes" in record:
        return f"{text}; from now on in batches of up to {format_bytes(record['cap_bytes'])}"
    predicted = record["predicted_bytes"]
    return text if predicted is None else f"{text} (predicted: {format_bytes(predicted)})"


def _amount(record: Record, name: str) -> str:
    number = record[name]
    return format_bytes(number) if record["unit"] == "bytes" else f"{number:,} {record['unit']}"


def show(line: str) -> None:
    """Show what brim does: notes on stderr, or in a notebook's cell, and a line that says how far it has come.

    This is the default of `say`. With `say=None`, nothing is shown; a function of yours is given each note and nothing
    else.
    """
    if is_told(line):
        Screen()(line)


class Listener(Observer, Protocol):
    """Hear notes, what is being done, the steps of a run, and how many rows are done."""

    def __call__(self, line: str) -> None: ...

    def advance(self, num_rows: int) -> None:
        """Count so many more rows as done."""


@contextmanager
def listening(say: Say | None, *, is_short: bool = False) -> Iterator[Listener]:
    """Yield the listener for `say`; for the default it is brim's own screen.

    is_short: of that: see `Screen`. Raises InputError if `say` cannot be called.
    """
    given: object = say
    if given is not None and not callable(given):
        expected = "a function that takes a line, such as print, or None for silence"
        raise InputError(what=f"say is {say!r}", expected=expected, fix="leave it out to see what is done")
    if say is show:
        with Screen(is_short=is_short, hint="say=print") as screen:
            yield screen
    else:
        yield say if isinstance(say, Screen) else _NotesOnly(say)


class Screen:
    """Show notes and progress to people.

    stream: default: stderr; in a notebook, the cell's stdout, since stderr is shown there as if something had failed.
    is_short: show a card of at most eight lines before the first step or row. hint: how to see the other notes.
    """

    def __init__(self, stream: IO[str] | None = None, *, is_short: bool = False, hint: str = "") -> None:
        in_notebook = stream is None and _in_notebook()
        self._line = LiveLine(stream or (sys.stdout if in_notebook else sys.stderr), in_notebook=in_notebook)
        self._steps, self._rows = TrainProgress(self._line), RowProgress(self._line)
        self._hint, self._card = hint, PlanCard(hint=hint) if is_short else None

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_card()
        self._line.clear()

    def __call__(self, line: str) -> None:
        """Show a note, or what is being done from now on."""
        if self._card is not None and kind_of(line) == "begin":
            self._end_card()
            self._line.print(line)
            self._card = PlanCard(hint=self._hint)
        elif self._card.take(line) if self._card is not None else is_told(line):
            self._line.print(line)
        if kind_of(line) == "work":
            self._end_card()
        if kind_of(line) in ("status", "work"):
            self._rows.begin(line)

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._end_card()
        self._steps.start(first_step=first_step, total_steps=total_steps, total_samples=total_samples)

    def write(self, record: Record) -> None:
        self._steps.write(record)

    def close(self) -> None:
        self._steps.close()

    def advance(self, num_rows: int) -> None:
        self._rows.advance(num_rows)

    def take_card(self) -> list[tuple[str, str]]:
        """Take the lines of the card, if it has not been shown, for somebody else to show."""
        self._line.clear()
        return [] if self._card is None else self._card.end()

    def _end_card(self) -> None:
        for label, text in () if self._card is None else self._card.end():
            self._line.print(wrapped(label, text, width=self._line.width))


class _NotesOnly:
    """Pass the notes to a function of the caller's, and ignore everything else. say: None for silence."""

    def __init__(self, say: Say | None) -> None:
        self._say = say

    def __call__(self, line: str) -> None:
        if self._say is not None and is_told(line):
            self._say(line)

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        pass

    def write(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass

    def advance(self, num_rows: int) -> None:
        pass


def _in_notebook() -> bool:
    """Return whether this runs in an IPython kernel, whose output is shown below a cell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
