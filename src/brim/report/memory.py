"""Show a memory prediction as tables and squares: what takes the memory, where the peak is, whether it fits.

The closed form is shown with its distance from the prediction. A device's memory is drawn as squares of a GiB, or of
several where there would be too many, filled by category. Each category has one colour, one name and one letter, the
same in every table and picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from brim.memory import MemoryPrediction
from brim.memory.events import CATEGORIES, Category
from brim.notes import Note, planned
from brim.units import GIB, format_bytes, gib

if TYPE_CHECKING:
    from brim.memory.closed_form import Line, Napkin


def napkin_table(napkin: Napkin, prediction: MemoryPrediction) -> RenderableType:
    """Show each worked line, the totals at each moment, and the distance from the trace."""
    return Group(
        Text("on a napkin", style="bold"),
        Text(),
        _lines(napkin.lines),
        Text(),
        _moments(napkin),
        Text(),
        *(Text(line) for line in (*napkin.notes, distance(napkin, prediction))),
    )


def distance(napkin: Napkin, prediction: MemoryPrediction) -> str:
    """Say how far the napkin's largest moment lies from the traced peak."""
    off = napkin.total_bytes / prediction.allocated_bytes - 1 if prediction.allocated_bytes else 0.0
    return (
        f"the napkin says {gib(napkin.total_bytes)} GiB, when {_named(napkin.peak)}; the trace "
        f"{gib(prediction.allocated_bytes)} GiB allocated: {off:+.1%}"
    )


def _lines(lines: Sequence[Line]) -> Table:
    table = _explaining("", "how")
    for line in lines:
        table.add_row(line.name, gib(line.num_bytes), line.formula)
    return table


def _moments(napkin: Napkin) -> Table:
    table = _explaining("what is there when", "lines")
    for moment, total in napkin.moments.items():
        names = ", ".join(line.name for line in napkin.lines if moment in line.moments)
        table.add_row(_named(moment), gib(total), names, style="bold" if moment == napkin.peak else None)
    return table


def _explaining(first: str, last: str) -> Table:
    """Return an empty table of names, GiB and explanations; the last are wrapped where they are too long."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    return table


def _named(moment: str) -> str:
    return {
        "load": "the weights are loaded",
        "loss": "the loss is computed",
        "backward begins": "the backward pass begins",
        "backward ends": "the backward pass ends",
        "update": "the weights are updated",
        "prefill": "the prompt is read",
        "decode": "the last token is generated",
    }[moment]


_CHECKPOINTING = "trainer.enable_gradient_checkpointing: true keeps one tensor a layer and computes the others again"


_BAR_CHARACTERS = 30


_LEAST_SHARE = 0.005  # of the memory, for a part on the card


# How to lower a part when it is the largest one.
_LESS: Mapping[Part, str] = {
    "weights": "quantization: {bits: 4} makes a quarter of 16 bits",
    "gradients": "adapter: lora trains few weights",
    "optimizer_state": "adapter: lora trains few weights, trainer.optimizer.type: adamw_8bit keeps 8 bits of each",
    "activations": "they grow with rows × tokens (trainer.batch_size, preprocessing.global_max_sequence_length)",
    "logits_and_loss": "trainer.chunked_loss: true computes them in chunks",
    "temporary": "adapter: lora trains few weights",
}


def memory_table(prediction: MemoryPrediction, *, title: str) -> RenderableType:
    """Return the whole report for the terminal. title: of the model."""
    return Group(
        Text(f"{title}: {prediction.shape_in_words()}", style="bold"),
        Text(),
        _by_part(prediction),
        Text(),
        Card(parts=total_by_part(prediction), budget_bytes=prediction.budget_bytes),
        Text(),
        *(Text(line) for line in facts(prediction)),
    )


def memory_lines(prediction: MemoryPrediction) -> Iterator[str]:
    """Yield the notes of a card: the micro-batch, what it needs of what is there, the largest parts, and the facts."""
    needed, budget, other = prediction.total_bytes, prediction.budget_bytes, prediction.other
    memory = format_bytes(needed) + ("" if budget is None else f" of {format_bytes(budget)}")
    if budget is not None and prediction.fits is not None:
        missing = f"{format_bytes(needed - budget)} too little" if needed > budget else "it does not fit"
        memory += f": {'it fits' if prediction.fits else missing}"
    if prediction.gradient_checkpointing is not None:
        way, others = (
            ("checkpointing", "without") if prediction.gradient_checkpointing else ("no checkpointing", "with")
        )
        number = prediction.gradient_checkpointing
        way += "" if isinstance(number, bool) else f" of {number} layers"
        memory += f"; {way}" + ("" if other is None else f" ({format_bytes(other.total_bytes)} {others} it)")
    yield planned("batch", prediction.batch_in_words())
    yield planned("memory", memory)
    largest = sorted(total_by_part(prediction).items(), key=lambda part: -part[1])
    shown = [(part, num_bytes) for part, num_bytes in largest if num_bytes >= needed * _LEAST_SHARE]
    yield planned("parts", "; ".join(f"{LOOKS[part].label} {format_bytes(num_bytes)}" for part, num_bytes in shown))
    yield from facts(prediction)


def facts(prediction: MemoryPrediction) -> Iterator[str]:
    """Yield lines on where the peak is, the steps, the verdict and the automatic choices."""
    place = ", ".join(filter(None, (prediction.peak.phase, prediction.peak.where)))
    verdict = {None: "", True: "fits: ", False: "does not fit: "}[prediction.fits]
    barely_fits = bool(prediction.fits) and prediction.total_bytes > (prediction.budget_bytes or 0)
    details = [*_steps(prediction), *prediction.choices]
    yield Note(f"peak: {place}", kind="detail")
    yield from (Note(line, kind="note" if prediction.fits is False else "detail") for line in _largest(prediction))
    yield Note(f"{verdict}{prediction.reason}", kind="note" if barely_fits else "detail")
    yield from (line if isinstance(line, Note) else Note(line, kind="detail") for line in details)
    yield from _beside_reports(prediction)


def _by_part(prediction: MemoryPrediction) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("%", justify="right")
    table.add_column("")
    whole = prediction.total_bytes
    for part, num_bytes in total_by_part(prediction).items():
        if part == "unused":
            table.add_row("allocated at the peak", gib(prediction.allocated_bytes), style="bold")
        if num_bytes:
            bar = Text("█" * round(_BAR_CHARACTERS * num_bytes / whole) or "▏", style=LOOKS[part].colour)
            table.add_row(LOOKS[part].label, gib(num_bytes), f"{100 * num_bytes / whole:.1f}", bar)
    table.add_row("needed on the device", gib(prediction.total_bytes), style="bold")
    if prediction.budget_bytes is not None:
        left = prediction.budget_bytes - prediction.total_bytes
        table.add_row("free" if left >= 0 else "missing", gib(abs(left)))
    other = prediction.other
    if other is not None:
        table.add_row(f"{'with' if other.gradient_checkpointing else 'without'} checkpointing", gib(other.total_bytes))
    return table


def _largest(prediction: MemoryPrediction) -> Iterator[str]:
    """Name the largest part of a training step and the keys that lower it.

    It is what most often differs between these figures and those of others.
    """
    if prediction.phase == "train":
        part = max(prediction.by_category, key=lambda each: prediction.by_category[each])
        is_taken = {"weights": prediction.quantization_bits == 4, "logits_and_loss": prediction.has_chunked_loss}
        remedies = [_LESS[part]] if part in _LESS and not is_taken.get(part) else []
        if part == "activations" and prediction.gradient_checkpointing is not True:
            remedies.append(_CHECKPOINTING)
        less = f": {'; '.join(remedies)}" if remedies else ""
        yield f"the largest part is {LOOKS[part].label}, {format_bytes(prediction.by_category[part])}{less}"


def _beside_reports(prediction: MemoryPrediction) -> Iterator[str]:
    """Say why figures that others measured differ from these, where the settings explain more than a tenth."""
    if prediction.phase in ("train", "evaluate") and prediction.batch_size > 1:
        tokens = f"{prediction.sequence_length:,} tokens"
        yield f"each of the {prediction.batch_size:,} rows has all {tokens}: figures measured on shorter rows are lower"
    if prediction.quantization_bits == 4 and prediction.gradient_checkpointing is False:
        yield (
            "4-bit layers keep no input for the backward pass: figures measured with bitsandbytes before 0.43.2, which "
            "kept it, are higher"
        )


def _steps(prediction: MemoryPrediction) -> Iterator[str]:
    peaks = prediction.step_peaks_bytes
    if prediction.phase == "train" and len(peaks) > 1:
        first, later = format_bytes(peaks[0]), format_bytes(max(peaks[1:]))
        yield f"allocated at most: {first} in the first step, {later} in later ones"
    yield f"allocated at the end: {format_bytes(prediction.end_allocated_bytes)}"


Part: TypeAlias = Category | Literal["unused", "outside"]


_BEYOND = "#C00000"


_MOST_SQUARES, _SQUARES_A_LINE = 2048, 40  # for a device, or for one way to run


def square_bytes_for(most_bytes: int) -> int:
    """Return the bytes of a square: a GiB, doubled until so many bytes fit into `_MOST_SQUARES`."""
    square_bytes = GIB
    while most_bytes > _MOST_SQUARES * square_bytes:
        square_bytes *= 2
    return square_bytes


def squares(parts: Mapping[Part, int], *, square_bytes: int = GIB) -> list[Part]:
    """Return the part that each square shows, in the order of the parts: the one at the square's middle.

    The total is rounded to whole squares; a part of less than half a square may have none.
    """
    total = sum(parts.values())
    found: list[Part] = []
    end, spans = 0, []
    for part, num_bytes in parts.items():
        end += num_bytes
        spans.append((end, part))
    for number in range((total + square_bytes // 2) // square_bytes):
        middle = number * square_bytes + square_bytes // 2
        found.append(next((part for end, part in spans if middle < end), spans[-1][1]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Draw the squares in a terminal: free ones are empty, those beyond the device's memory are marked.

    Where there are no colours, letters say what the squares are.
    """

    parts: Mapping[Part, int]  # bytes
    budget_bytes: int | None
    legend_parts: Sequence[Part] | None = None  # None: the parts that have a square; empty: no legend

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        square_bytes = square_bytes_for(max(sum(self.parts.values()), self.budget_bytes or 0))
        filled = squares(self.parts, square_bytes=square_bytes)
        num_there = len(filled) if self.budget_bytes is None else self.budget_bytes // square_bytes
        num_all = max(len(filled), num_there)
        per_line = min(_SQUARES_A_LINE, options.max_width // 2)
        sign = _letter if console.color_system is None else _square
        for first in range(0, num_all, per_line):
            line = Text()
            for number in range(first, min(first + per_line, num_all)):
                if number < len(filled):
                    text, style = sign(filled[number])
                    line.append(text, style=style).append("!" if number >= num_there else " ", style=f"bold {_BEYOND}")
                else:
                    line.append("□ " if sign is _square else "· ", style="dim")
            yield line
        parts = filled if self.legend_parts is None else self.legend_parts
        if parts:
            yield _legend(
                [part for part in LOOKS if part in parts], square_bytes, sign, num_free=num_there - len(filled)
            )


def _legend(
    parts: Sequence[Part], square_bytes: int, sign: Callable[[Part], tuple[str, str]], *, num_free: int
) -> Text:
    """Explain what the squares stand for. sign: the character that stands for a part, and its style."""

    text = Text(f"each is {square_bytes // GIB:,} GiB: ")
    for number, part in enumerate(parts):
        shown, style = sign(part)
        text.append(", " if number else "").append(shown, style=style).append(f" {LOOKS[part].label}")
    if num_free > 0:
        text.append(", □ free" if sign is _square else ", · free")
    if num_free < 0:
        text.append(", ! beyond the device's memory")
    return text


def _square(part: Part) -> tuple[str, str]:
    return "■", LOOKS[part].colour


def _letter(part: Part) -> tuple[str, str]:
    return LOOKS[part].letter, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Hold how a part of the memory is shown."""

    label: str
    colour: str
    letter: str  # where there are no colours
    meaning: str


# Okabe and Ito's palette, which people with any of the common colour deficiencies tell apart (jfly.uni-koeln.de/color).
LOOKS: Mapping[Part, Look] = {
    "weights": Look(label="weights", colour="#0072B2", letter="W", meaning="the model's and the adapter's parameters"),
    "gradients": Look(
        label="gradients", colour="#E69F00", letter="G", meaning="one for each parameter that is trained"
    ),
    "optimizer_state": Look(
        label="optimizer state", colour="#009E73", letter="O", meaning="running averages, kept from step to step"
    ),
    "activations": Look(
        label="activations", colour="#D55E00", letter="A", meaning="what the backward pass needs of the forward pass"
    ),
    "logits_and_loss": Look(
        label="logits and loss", colour="#CC79A7", letter="L", meaning="scores of every word of the vocabulary"
    ),
    "kv_cache": Look(label="KV cache", colour="#56B4E9", letter="K", meaning="keys and values of earlier tokens"),
    "workspace": Look(label="workspace", colour="#8C8C8C", letter="S", meaning="scratch memory of matrix libraries"),
    "temporary": Look(label="temporary", colour="#F0E442", letter="T", meaning="freed again within the same phase"),
    "unused": Look(
        label="held, not in use", colour="#D9D9D9", letter="h", meaning="reserved by PyTorch's allocator, in no tensor"
    ),
    "outside": Look(label="outside PyTorch", colour="#4D4D4D", letter="x", meaning="the CUDA context and libraries"),
}


def total_by_part(prediction: MemoryPrediction) -> dict[Part, int]:
    """Return all that a device must have, by part: what lives at the allocated peak, and the most that is reserved."""
    parts: dict[Part, int] = {category: prediction.by_category.get(category, 0) for category in CATEGORIES}
    parts["unused"] = prediction.reserved_bytes - sum(parts.values())
    parts["outside"] = prediction.outside_bytes
    return parts
