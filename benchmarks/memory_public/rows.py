"""Read the public measurements as rows, and say which goal each row is judged by."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from transformers import AutoConfig, PretrainedConfig

from brim import InputError
from brim.errors import Problem, problems_of
from brim.memory.devices import Device, find_device

DATA = Path(__file__).parent.parent / "data" / "memory"
_MOST_PROBLEMS = 10  # that are told at once
_LIKE = "a folder like benchmarks/data/memory, which its README.md describes"

# The models that were quantised with GPTQ have the architectures of their origins.
_ORIGINS = {
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "TheBloke/Llama-2-70B-GPTQ": "NousResearch/Llama-2-70b-hf",
}

Read = TypeVar("Read")
Number = TypeVar("Number", int, float)
Group: TypeAlias = Literal[
    "full and LoRA, one GPU", "4-bit, one GPU", "FSDP on 2 and 4 GPUs", "GPTQ, FSDP on 2 and 4 GPUs"
]
Quantization: TypeAlias = Literal["none", "nf4", "gptq"]
Loss: TypeAlias = Literal["stock", "triton", "liger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold one run of `gpu_memory_a100.csv`."""

    id: str
    model: str
    architecture: PretrainedConfig = field(repr=False, compare=False)  # with the vocabulary of the run
    method: Literal["full", "lora", "qlora"]
    quantization: Quantization
    group_size: int | None  # of GPTQ; None: one scale for each output
    precision: Literal["no AMP", "bf16", "fp16"]
    lora_targets: tuple[str, ...]
    lora_r: int | None
    batch_size: int  # of one GPU
    sequence_length: int
    gpus: int
    device: Device
    kernels: str
    transformers: tuple[int, int]
    peak_allocated_bytes: int | None  # None: the run failed
    end_allocated_bytes: int | None
    nvidia_smi_mib: int | None

    @property
    def ran(self) -> bool:
        return self.peak_allocated_bytes is not None

    @property
    def loss(self) -> Loss:
        """Return the kernels of loss, norm and rotary embedding, which were switched together but for the loss."""
        if "liger" in self.kernels:
            return "liger"
        return "triton" if "triton kernels" in self.kernels or "triton fast" in self.kernels else "stock"

    @property
    def prepared_for_kbit(self) -> bool:
        """Tell whether PEFT's prepare_model_for_kbit_training was called, which raises what is not quantised."""
        return "prepare_model_for_kbit" in self.kernels

    @property
    def group(self) -> Group:
        if self.gpus > 1:
            return "GPTQ, FSDP on 2 and 4 GPUs" if self.quantization == "gptq" else "FSDP on 2 and 4 GPUs"
        return "full and LoRA, one GPU" if self.quantization == "none" else "4-bit, one GPU"


_NAME = "gpu_memory_a100.csv"
_COLUMNS = (
    *("id", "source_url", "model", "method", "quantization", "precision", "lora_r", "lora_targets", "batch_per_gpu"),
    *("sequence_length", "gpus", "gpu", "kernels", "versions"),
    *("peak_allocated_bytes", "end_allocated_bytes", "nvidia_smi_mib"),
)

# tokenizer_and_embedding_resize of fms-hf-tuning resizes the embeddings to the tokenizer's length, after it has given
# it a padding token. The tokenizers of these have 32,000 tokens; santacoder's has 49,152 and its special ones.
_VOCABULARY = {("llama", 32_000): 32_001, ("mistral", 32_000): 32_001, ("gpt_bigcode", 49_280): 49_158}

# Of TheBloke's main branches, by their model cards; None: one scale for each output.
_GROUP_SIZES: dict[str, int | None] = {"TheBloke/Mistral-7B-v0.1-GPTQ": 128, "TheBloke/Llama-2-70B-GPTQ": None}


def read_rows(data: Path = DATA) -> list[Row]:
    """Return all runs, in the file's order. Raises InputError where they cannot be read."""
    return read_table(data, _NAME, _COLUMNS, partial(_row, data))


def _row(data: Path, cells: Cells) -> Row:
    precision, quantization = cells.text("precision"), cells.text("quantization")
    method = cells.one_of("method", "full", "lora", "qlora")
    kind: Quantization = "none" if quantization == "none" else "gptq" if "gptq" in quantization else "nf4"
    architecture = architecture_of(data, cells)
    group_size = _group_size(cells, architecture) if kind == "gptq" else None
    usual = _VOCABULARY.get((architecture.model_type, architecture.vocab_size), architecture.vocab_size)
    architecture.vocab_size = cells.number("vocabulary_size", int) if cells.text("vocabulary_size") else usual
    return Row(
        id=cells.text("id"),
        model=cells.text("model"),
        architecture=architecture,
        method=method,
        quantization=kind,
        group_size=group_size,
        precision="bf16" if "bf16=True" in precision else "fp16" if "fp16=True" in precision else "no AMP",
        lora_targets=tuple(cells.text("lora_targets").split()),
        lora_r=None if method == "full" else cells.number("lora_r", int),
        batch_size=cells.number("batch_per_gpu", int),
        sequence_length=cells.number("sequence_length", int),
        gpus=cells.number("gpus", int),
        device=_device(cells),
        kernels=cells.text("kernels"),
        transformers=_transformers(cells),
        peak_allocated_bytes=_recorded(cells, "peak_allocated_bytes"),
        end_allocated_bytes=_recorded(cells, "end_allocated_bytes"),
        nvidia_smi_mib=_recorded(cells, "nvidia_smi_mib"),
    )


def _group_size(cells: Cells, architecture: PretrainedConfig) -> int | None:
    """Return weights that share a scale, as config.json says, and None where all of an output do."""
    if cells.text("model") in _GROUP_SIZES:
        return _GROUP_SIZES[cells.text("model")]
    size = (getattr(architecture, "quantization_config", None) or {}).get("group_size")
    if not isinstance(size, int):
        what = f"quantised with GPTQ, and the config.json of {cells.text('model')} has no group size"
        raise InputError(Problem(where=cells.where, what=what, expected="quantization_config.group_size there"))
    del architecture.quantization_config  # transformers would quantise by it
    return size if size > 0 else None


def _device(cells: Cells) -> Device:
    """Kernels are traced as an A100 runs them; how much memory it has is the row's."""
    expected = "an A100, such as A100-80GB"
    try:
        device = find_device(cells.text("gpu"))
    except InputError as error:
        what = f"gpu is {cells.text('gpu')!r}"
        raise InputError(Problem(where=cells.where, what=what, expected=expected)) from error
    if device.capability != (8, 0):
        raise InputError(Problem(where=cells.where, what=f"gpu is {cells.text('gpu')!r}", expected=expected))
    return device


def _transformers(cells: Cells) -> tuple[int, int]:
    """Return 4.45 or 4.48: the libraries' versions go together. Where the row names none, its file's count."""
    version = re.search(r"transformers (\d+)\.(\d+)", cells.text("versions"))
    if version:
        return int(version[1]), int(version[2])
    return (4, 45) if "_liger.csv" in cells.text("source_url") else (4, 48)


def _recorded(cells: Cells, column: str) -> int | None:
    """Return a cell of memory; what was not recorded stands as 0 or a few MiB."""
    number = cells.read(column, int, "a whole number, or nothing") if cells.text(column) else 0
    return number if number > 1000 else None


class Cells:
    """Hold a row of a table. What is missing or not a number is told with its line and column."""

    def __init__(self, where: str, cells: Mapping[str, str | None]) -> None:
        self.where = where
        self._cells = cells

    def text(self, column: str) -> str:
        """Return the cell, which may be empty; so is that of an optional column that the table lacks."""
        return (self._cells.get(column) or "").strip()

    def one_of(self, column: str, *known: str) -> Any:
        """Return the cell, which is one of these."""
        return self.read(column, lambda text: known[known.index(text)], f"one of {', '.join(known)}")

    def number(self, column: str, kind: Callable[[str], Number]) -> Number:
        """Return a number above zero."""
        return self.read(column, partial(_positive, kind), f"a{' whole' if kind is int else ''} number above zero")

    def read(self, column: str, read: Callable[[str], Read], expected: str) -> Read:
        """Return what `read` makes of the cell. Raises InputError where that is a ValueError."""
        text = self.text(column)
        try:
            return read(text)
        except ValueError as error:
            what = f"{column} is {text!r}" if text else f"{column} is empty"
            raise InputError(Problem(where=self.where, what=what, expected=expected)) from error


def read_table(data: Path, name: str, columns: Sequence[str], read: Callable[[Cells], Read | None]) -> list[Read]:
    """Read the rows of a table, in the file's order; those of which `read` makes None are left out.

    Raises InputError for a missing folder, file or column, and for all rows that cannot be read.
    """
    path = data / name
    if not data.is_dir():
        raise InputError(Problem(what=f"no such folder: {data}", expected=_LIKE))
    if not path.is_file():
        raise InputError(Problem(what=f"{data} has no {name}", expected=_LIKE))
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            what = f"without the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise InputError(Problem(where=str(path), what=what, expected=f"the columns {', '.join(columns)}"))
        rows = [Cells(f"{path}:{reader.line_num} ({row['id']})", row) for row in reader]
    found: list[Read | None] = []
    problems = problems_of(*(lambda row=row: found.append(read(row)) for row in rows))
    if problems:
        raise InputError(*problems[:_MOST_PROBLEMS])
    return [row for row in found if row is not None]


def architecture_of(
    data: Path, cells: Cells, *, known: Mapping[str, PretrainedConfig] | None = None
) -> PretrainedConfig:
    """Return the config.json of the row's model, as it is; of one that has none there, what is known of it."""
    model = cells.text("model")
    path = model_folder(data, model) / "config.json"
    if not path.is_file() and known is not None and model in known:
        return deepcopy(known[model])
    if not path.is_file():
        raise InputError(Problem(what=f"no architecture of {model}", expected=f"the file {path}"))
    try:
        architecture: PretrainedConfig = AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        what = f"no config.json of a model that transformers knows: {str(error).splitlines()[0]}"
        raise InputError(Problem(where=str(path), what=what)) from error
    return architecture


def model_folder(data: Path, model: str) -> Path:
    """Return where the model's config.json lies; its origin's folder where it has none of its own."""
    own, origin = (data / "models" / name.replace("/", "--") for name in (model, _ORIGINS.get(model, model)))
    return own if own.is_dir() else origin


def _positive(kind: Callable[[str], Number], text: str) -> Number:
    number = kind(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number
