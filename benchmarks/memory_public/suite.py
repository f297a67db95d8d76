"""Two runs of PEFT's MetaMathQA suite, which do what brim itself runs: SDPA, padded rows, no checkpointing.

The lengths of their batches are not known: rows of up to 768 tokens, by length; reserved memory is the 99th percentile
over the steps. Both runs saw the same batches. So the length is taken from one of them, and the other is predicted.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.memory_public.rows import DATA
from brim import predict_memory

KNOWN, ASKED = "PEFT-18-p99", "PEFT-20-p99"  # LoRA on q_proj and v_proj, r=32 and r=64
LONGEST_TOKENS = 768
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """What the second run was predicted to reserve, at the length that explains the first."""

    tokens: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def predict_suite() -> SuiteResult:
    """The length is the shortest at which the first run is predicted to reserve what it reserved."""
    rows = _rows()
    below, above = 1, LONGEST_TOKENS
    while above - below > 1:
        middle = (below + above) // 2
        if _reserved(rows[KNOWN].rank, middle) < rows[KNOWN].measured_bytes:
            below = middle
        else:
            above = middle
    return SuiteResult(
        tokens=above,
        predicted_bytes=_reserved(rows[ASKED].rank, above),
        measured_bytes=rows[ASKED].measured_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SuiteRow:
    rank: int
    measured_bytes: int


def _rows() -> dict[str, _SuiteRow]:
    with (DATA / "gpu_memory_other.csv").open(encoding="utf-8", newline="") as file:
        return {
            cells["id"]: _SuiteRow(
                rank=int(cells["lora_r"]), measured_bytes=round(float(cells["value_gib_or_gb"]) * _GIB)
            )
            for cells in csv.DictReader(file)
            if cells["id"] in (KNOWN, ASKED)
        }


@cache
def _reserved(rank: int, tokens: int) -> int:
    config: dict[str, Any] = {
        "model_type": "llm",
        "base_model": str(DATA / "models" / "meta-llama--Llama-3.2-3B"),
        "input_features": [{"name": "query", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "adapter": {"type": "lora", "r": rank, "target_modules": ["q_proj", "v_proj"]},
        "precision": "bf16-true",
        "trainer": {
            "type": "finetune",
            "gradient_accumulation_steps": 1,
            "enable_gradient_checkpointing": False,
            "chunked_loss": False,
        },
    }
    return predict_memory(config, batch_size=4, sequence_length=tokens, device="l40s").reserved_bytes
