"""Judge two runs of PEFT's MetaMathQA suite, which do what brim runs: SDPA, padded rows, no checkpointing.

The lengths of their batches are not known: rows of up to 768 tokens, by length; reserved memory is the 99th percentile
over the steps. Both runs saw the same batches. So the length is taken from one of them, and the other is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.memory_public.answer import NAME
from benchmarks.memory_public.rows import DATA, Cells, architecture_of, model_folder, read_table
from brim import predict_memory

KNOWN, ASKED = "PEFT-18-p99", "PEFT-20-p99"  # LoRA on q_proj and v_proj, r=32 and r=64
LONGEST_TOKENS = 768
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """Hold what the second run was predicted to reserve, at the length that explains the first."""

    tokens: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def read_suite_rows(data: Path = DATA) -> dict[str, SuiteRow] | None:
    """Return the two runs; None where the table lacks one. Raises InputError where they cannot be read."""
    rows = {row.id: row for row in read_table(data, NAME, _COLUMNS, partial(_row, data))}
    return rows if len(rows) == len((KNOWN, ASKED)) else None


def predict_suite(rows: Mapping[str, SuiteRow]) -> SuiteResult:
    """The length is the shortest at which the first run is predicted to reserve what it reserved."""
    below, above = 1, LONGEST_TOKENS
    while above - below > 1:
        middle = (below + above) // 2
        if _reserved(rows[KNOWN], middle) < rows[KNOWN].measured_bytes:
            below = middle
        else:
            above = middle
    return SuiteResult(
        tokens=above,
        predicted_bytes=_reserved(rows[ASKED], above),
        measured_bytes=rows[ASKED].measured_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRow:
    """Hold what differs between the two."""

    id: str
    base_model: str
    rank: int
    measured_bytes: int


_COLUMNS = ("id", "model", "lora_r", "value_gib_or_gb")


def _row(data: Path, cells: Cells) -> SuiteRow | None:
    if cells.text("id") not in (KNOWN, ASKED):
        return None
    architecture_of(data, cells)  # raises InputError where there is none
    return SuiteRow(
        id=cells.text("id"),
        base_model=str(model_folder(data, cells.text("model"))),
        rank=cells.number("lora_r", int),
        measured_bytes=round(cells.number("value_gib_or_gb", float) * _GIB),
    )


@cache
def _reserved(row: SuiteRow, tokens: int) -> int:
    config: dict[str, Any] = {
        "model_type": "llm",
        "base_model": row.base_model,
        "input_features": [{"name": "query", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "adapter": {"type": "lora", "r": row.rank, "target_modules": ["q_proj", "v_proj"]},
        "precision": "bf16-true",
        "trainer": {
            "type": "finetune",
            "gradient_accumulation_steps": 1,
            "enable_gradient_checkpointing": False,
            "chunked_loss": False,
        },
    }
    return predict_memory(config, batch_size=4, sequence_length=tokens, device="l40s").reserved_bytes
