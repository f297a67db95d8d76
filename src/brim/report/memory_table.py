"""A prediction as a table: what takes the memory at the peak, where the peak is, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from brim.memory.events import Place
from brim.memory.prediction import MemoryPrediction
from brim.report.categories import LOOKS, Part, total_by_part
from brim.report.memory_squares import Card

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

GIB = 2**30
_CHECKPOINTING = "trainer.enable_gradient_checkpointing: true keeps one tensor a layer and computes the others again"
_BAR_CHARACTERS = 30
_SQUARES_A_LINE = 40

# What lowers a part, where it is the largest one.
_LESS: Mapping[Part, str] = {
    "weights": "quantization: {bits: 4} makes a quarter of 16 bits",
    "gradients": "adapter: lora trains few weights",
    "optimizer_state": "adapter: lora trains few weights, trainer.optimizer.type: adamw_8bit keeps 8 bits of each",
    "activations": "they grow with rows × tokens (trainer.batch_size, preprocessing.global_max_sequence_length)",
    "logits_and_loss": "trainer.chunked_loss: true computes them in chunks",
    "temporary": "adapter: lora trains few weights",
}


def memory_table(prediction: MemoryPrediction, *, title: str) -> RenderableType:
    """The whole report for the terminal. title: of the model."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(headline(prediction, title=title), style="bold"),
        Text(),
        _by_part(prediction),
        Text(),
        Card(parts=total_by_part(prediction), budget_bytes=prediction.budget_bytes, per_line=_SQUARES_A_LINE),
        Text(),
        *(Text(line) for line in facts(prediction)),
    )


def headline(prediction: MemoryPrediction, *, title: str) -> str:
    """Model, phase, shape and device in a line."""
    return f"{title}: {prediction.shape_in_words()}"


def facts(prediction: MemoryPrediction) -> Iterator[str]:
    """Where the peak is, the steps, the verdict and the automatic choices, as lines."""
    yield f"peak: {place_in_words(prediction.peak)}"
    yield from _largest(prediction)
    yield from _beside_reports(prediction)
    yield from _steps(prediction)
    if prediction.fits is not None:
        yield f"{'fits' if prediction.fits else 'does not fit'}: {prediction.reason}"
    else:
        yield prediction.reason
    yield from prediction.choices


def place_in_words(place: Place) -> str:
    """A place as phase, operator and module: "backward, mm in model.layers.3.mlp"."""
    where = operator_and_module(place)
    return f"{place.phase}, {where}" if where else place.phase


def operator_and_module(place: Place) -> str:
    """A place without its phase; PEFT's wrapping is left out of the module's path."""
    operator = place.operator.removeprefix("aten::").removeprefix("aten.")
    module = place.module.removeprefix("base_model.model.")
    return f"{operator} in {module}" if operator and module else operator or module


def gib(num_bytes: int) -> str:
    """GiB with two decimals; three where there is little."""
    value = num_bytes / GIB
    if num_bytes == 0:
        return "0"
    return f"{value:,.3f}" if 0 < abs(value) < 0.1 else f"{value:,.2f}"


def _by_part(prediction: MemoryPrediction) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("%", justify="right")
    table.add_column("")
    for part, num_bytes in total_by_part(prediction).items():
        if part == "unused":
            table.add_row("allocated at the peak", gib(prediction.allocated_bytes), style="bold")
        if num_bytes:
            bar = Text(_bar(num_bytes, prediction.total_bytes), style=LOOKS[part].colour)
            table.add_row(LOOKS[part].label, gib(num_bytes), _percent(num_bytes, prediction.total_bytes), bar)
    table.add_row("needed on the device", gib(prediction.total_bytes), style="bold")
    if prediction.budget_bytes is not None:
        left = prediction.budget_bytes - prediction.total_bytes
        table.add_row("free" if left >= 0 else "missing", gib(abs(left)))
    other = prediction.other
    if other is not None:
        table.add_row(f"{'with' if other.gradient_checkpointing else 'without'} checkpointing", gib(other.total_bytes))
    return table


def _largest(prediction: MemoryPrediction) -> Iterator[str]:
    """What a training step is made of for the most, and which key lowers that; figures that differ, differ in it."""
    if prediction.phase == "train":
        part = max(prediction.by_category, key=lambda each: prediction.by_category[each])
        is_taken = {"weights": prediction.quantization_bits == 4, "logits_and_loss": prediction.has_chunked_loss}
        ways = [_LESS[part]] if part in _LESS and not is_taken.get(part) else []
        if part == "activations" and not prediction.gradient_checkpointing:
            ways.append(_CHECKPOINTING)
        less = f": {'; '.join(ways)}" if ways else ""
        yield f"the most is {LOOKS[part].label}, {gib(prediction.by_category[part])} GiB{less}"


def _beside_reports(prediction: MemoryPrediction) -> Iterator[str]:
    """Say by what figures that others measured differ from these, where the settings make it more than a tenth."""
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
        yield f"allocated at most: {gib(peaks[0])} GiB in the first step, {gib(max(peaks[1:]))} GiB in later ones"
    yield f"allocated at the end: {gib(prediction.end_allocated_bytes)} GiB"


def _percent(num_bytes: int, whole: int) -> str:
    return f"{100 * num_bytes / whole:.1f}" if whole else ""


def _bar(num_bytes: int, whole: int) -> str:
    length = round(_BAR_CHARACTERS * num_bytes / whole) if whole else 0
    return "█" * length or "▏"
