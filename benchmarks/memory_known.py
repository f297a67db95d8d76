"""Compare figures of memory that people know with what `brim memory` says of the same settings.

`python -m benchmarks.memory_known` needs no GPU and no weights. A figure is either what was measured, then brim's lies
within a tenth of it or the reason stands on brim's screen; or it is a card on which the run is known to fit.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from benchmarks.memory_cards import MODELS
from benchmarks.report import print_table, write_report
from brim import predict_memory
from brim.memory import MemoryPrediction
from brim.notes import PlanCard
from brim.report import memory_lines

GB, GIB = 10**9, 2**30
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
TORCHTUNE = "https://github.com/pytorch/torchtune/blob/main/README.md"
FMS = "https://github.com/foundation-model-stack/fms-acceleration/blob/main/scripts/benchmarks/refs/a100_80gb.csv"
PEFT = "https://github.com/huggingface/peft/tree/main/method_comparison/MetaMathQA/results"
QLORA = "https://arxiv.org/abs/2305.14314"
_TOLERANCE = 0.1

MORE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-65b": {**MODELS["llama-2-7b"], "hidden_size": 8192, "intermediate_size": 22_016, "num_hidden_layers": 80,
                  "num_attention_heads": 64, "num_key_value_heads": 64},
}  # fmt: skip
QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Hold a published figure, and the settings that it is of."""

    name: str
    source: str
    model: str
    device: str
    kind: Literal["allocated", "reserved", "card"]  # a card: its nominal memory
    num_bytes: float
    rows: int
    tokens: int
    keys: Mapping[str, Any] = field(default_factory=dict)  # of brim's configuration, by dotted name
    why: str = ""  # words of brim's screen, where it differs by more than the tolerance

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={_flow(value)}" for key, value in self.keys.items()]

    @property
    def command(self) -> str:
        flags = f"--batch-size {self.rows} --sequence-length {self.tokens} --device {self.device}"
        return f"brim memory config.yaml {' '.join(map(shlex.quote, self.overrides))} {flags}"


def _flow(value: Any) -> str:
    """Return a value as YAML in a line."""
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lora(r: int, targets: Any, **trainer: Any) -> dict[str, Any]:
    return {
        "adapter.type": "lora",
        "adapter.r": r,
        "adapter.dropout": 0,
        "adapter.target_modules": targets,
        "trainer.optimizer.type": "adamw",
        **{f"trainer.{key}": value for key, value in trainer.items()},
    }


# As each of them was measured: LitGPT's updates learn from 128 rows, the others' from one micro-batch.
_LITGPT = _lora(8, QV, enable_gradient_checkpointing=False, effective_batch_size=128)
_ALONE = {"trainer.gradient_accumulation_steps": 1}
_NF4 = {"quantization.bits": 4}
# MatMul4Bit.forward in bitsandbytes/autograd/_functions.py: `ctx.tensors = (A, B)`, and `(None, B)` from 0.43.2 on.
# LitGPT measured with 0.41.
_KEPT_INPUTS = "figures measured with bitsandbytes before 0.43.2, which kept it, are higher"
_SHORTER = "figures measured on shorter rows are lower"  # PEFT's have up to 768 tokens and are sorted by length
KNOWN = (
    Known(name="Llama-2-7B LoRA, 16 bits", source=LITGPT, model="llama-2-7b", device="a100-40gb", kind="allocated",
          num_bytes=21.30 * GB, rows=1, tokens=1304, keys=_LITGPT),
    Known(name="Llama-2-7B LoRA, 16 bits, 2 rows", source=LITGPT, model="llama-2-7b", device="a100-40gb",
          kind="allocated", num_bytes=29.07 * GB, rows=2, tokens=1304, keys=_LITGPT),
    Known(name="Llama-2-7B QLoRA", source=LITGPT, model="llama-2-7b", device="a100-40gb", kind="allocated",
          num_bytes=13.84 * GB, rows=1, tokens=1304, keys={**_LITGPT, **_NF4}, why=_KEPT_INPUTS),
    Known(name="Llama-2-13B LoRA, 16 bits", source=LITGPT, model="llama-2-13b", device="a100-40gb", kind="allocated",
          num_bytes=38.12 * GB, rows=1, tokens=1304, keys=_LITGPT),
    Known(name="Llama-2-13B QLoRA", source=LITGPT, model="llama-2-13b", device="a100-40gb", kind="allocated",
          num_bytes=22.55 * GB, rows=1, tokens=1304, keys={**_LITGPT, **_NF4}, why=_KEPT_INPUTS),
    Known(name="Mistral-7B, all weights in bf16", source=FMS, model="mistral-7b", device="a100-80gb",
          kind="allocated", num_bytes=72_434_837_504, rows=4, tokens=4096,
          keys={"precision": "bf16-true", "trainer.optimizer.type": "adamw",
                "trainer.enable_gradient_checkpointing": True, **_ALONE}),
    Known(name="Mistral-7B LoRA, 4 rows of 4,096", source=FMS, model="mistral-7b", device="a100-80gb",
          kind="allocated", num_bytes=26_704_571_904, rows=4, tokens=4096,
          keys={**_lora(16, ALL, enable_gradient_checkpointing=True, chunked_loss=False), **_ALONE}),
    Known(name="Llama-3.2-3B LoRA, 4 rows of 768", source=PEFT, model="llama-3.2-3b", device="l40s", kind="reserved",
          num_bytes=18.7383 * GIB, rows=4, tokens=768,
          keys={**_lora(32, QV, enable_gradient_checkpointing=False, chunked_loss=False), **_ALONE}, why=_SHORTER),
    Known(name="Llama-3.1-8B QLoRA on an RTX 4090", source=TORCHTUNE, model="llama-3-8b", device="rtx-4090",
          kind="allocated", num_bytes=7.4 * GIB, rows=2, tokens=2048,
          keys={**_lora(8, [*ALL, "gate_proj", "up_proj", "down_proj"], enable_gradient_checkpointing=True), **_NF4,
                **_ALONE}),
    Known(name="Llama-65B QLoRA on 48 GB", source=QLORA, model="llama-65b", device="rtx-a6000", kind="card",
          num_bytes=48 * GIB, rows=1, tokens=512,
          keys={**_lora(64, "all-linear"), **_NF4, "trainer.optimizer.type": "paged_adamw"}),
)  # fmt: skip


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"trainer.epochs": 1} as {"trainer": {"epochs": 1}}."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        section = found
        *above, last = key.split(".")
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return found


def predicted(known: Known, folder: Path) -> MemoryPrediction:
    """Return what brim says of the settings, with PEFT's own LoRA as in those runs: brim's keeps less."""
    path = folder / known.model
    path.mkdir(exist_ok=True)
    architecture = {**MODELS, **MORE_MODELS}[known.model]
    (path / "config.json").write_text(json.dumps({**architecture, "max_position_embeddings": 8192}), encoding="utf-8")
    config = nested({"base_model": str(path), "trainer.type": "finetune", **known.keys})
    with patch("brim.models.adapters.use_adapter_function", lambda model: None):
        return predict_memory(
            config, batch_size=known.rows, sequence_length=known.tokens, phase="train", device=known.device
        )


def agrees(known: Known, prediction: MemoryPrediction) -> bool:
    """Tell whether brim's figure is the one that people know."""
    if known.kind == "card":
        return prediction.fits is True and prediction.total_bytes <= known.num_bytes
    found = prediction.allocated_bytes if known.kind == "allocated" else prediction.reserved_bytes
    return abs(found / known.num_bytes - 1) <= _TOLERANCE


def explained(known: Known, prediction: MemoryPrediction) -> bool:
    """Tell whether the reason for another figure stands on the card of that very configuration."""
    return bool(known.why) and any(known.why in line for line in screen(prediction))


def screen(prediction: MemoryPrediction) -> list[str]:
    """Return the lines that `brim memory` shows unasked."""
    card = PlanCard()
    for line in memory_lines(prediction):
        card.take(line)
    return [f"{label}: {text}" for label, text in card.end()]


def main() -> int:
    rows, figures, is_explained = [], [], True
    with tempfile.TemporaryDirectory() as name:
        for known in KNOWN:
            prediction = predicted(known, Path(name))
            told = {"allocated": prediction.allocated_bytes, "reserved": prediction.reserved_bytes,
                    "card": prediction.total_bytes}  # fmt: skip
            is_alike = agrees(known, prediction)
            is_explained = is_explained and (is_alike or explained(known, prediction))
            difference = f"{told[known.kind] / known.num_bytes - 1:+.1%}"
            rows.append((known.name, known.kind, f"{known.num_bytes / GIB:.2f}", f"{told[known.kind] / GIB:.2f}",
                         ("fits" if is_alike else "does not fit") if known.kind == "card" else difference))  # fmt: skip
            figures.append(
                {
                    "name": known.name,
                    "source": known.source,
                    "command": known.command,
                    "kind": known.kind,
                    "known_bytes": round(known.num_bytes),
                    "brim_bytes": told[known.kind],
                    "agrees": is_alike,
                    "why": known.why,
                    "screen": screen(prediction),
                }
            )
            print(rows[-1], flush=True)
    print_table("figures that people know, and brim's (GiB)", ("what", "figure", "known", "brim", ""), rows)
    write_report("memory_known", figures={"figures": figures}, num_threads=torch.get_num_threads())
    return 0 if is_explained else 1


if __name__ == "__main__":
    sys.exit(main())
