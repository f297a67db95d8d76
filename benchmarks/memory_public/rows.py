"""The public measurements as rows, and which goal each row is judged by."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

DATA = Path(__file__).parent.parent / "data" / "memory"

Group: TypeAlias = Literal[
    "full and LoRA, one GPU", "4-bit, one GPU", "FSDP on 2 and 4 GPUs", "GPTQ, FSDP on 2 and 4 GPUs"
]
Loss: TypeAlias = Literal["stock", "triton", "liger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of `gpu_memory_a100.csv`."""

    id: str
    model: str
    method: Literal["full", "lora", "qlora"]
    quantization: Literal["none", "nf4", "gptq"]
    precision: Literal["no AMP", "bf16", "fp16"]
    lora_targets: tuple[str, ...]
    lora_r: int | None
    batch_size: int  # of one GPU
    sequence_length: int
    gpus: int
    kernels: str
    transformers: tuple[int, int]  # 4.45 or 4.48: the libraries' versions go together
    peak_allocated_bytes: int | None  # None: the run failed
    end_allocated_bytes: int | None
    nvidia_smi_mib: int | None

    @property
    def ran(self) -> bool:
        return self.peak_allocated_bytes is not None

    @property
    def loss(self) -> Loss:
        """The kernels of loss, norm and rotary embedding, which were switched together but for the loss."""
        if "liger" in self.kernels:
            return "liger"
        return "triton" if "triton kernels" in self.kernels or "triton fast" in self.kernels else "stock"

    @property
    def prepared_for_kbit(self) -> bool:
        """By PEFT's prepare_model_for_kbit_training, which raises what is not quantised to fp32."""
        return "prepare_model_for_kbit" in self.kernels

    @property
    def group(self) -> Group:
        if self.gpus > 1:
            return "GPTQ, FSDP on 2 and 4 GPUs" if self.quantization == "gptq" else "FSDP on 2 and 4 GPUs"
        return "full and LoRA, one GPU" if self.quantization == "none" else "4-bit, one GPU"


def read_rows(path: Path = DATA / "gpu_memory_a100.csv") -> list[Row]:
    """All runs, in the file's order. The failed ones do not say their versions: those of the file they come from."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


# The models that were quantised with GPTQ have the architectures of their origins.
_ORIGINS = {
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "TheBloke/Llama-2-70B-GPTQ": "NousResearch/Llama-2-70b-hf",
}


def model_config(model: str) -> dict[str, Any]:
    """The model's config.json."""
    path = DATA / "models" / _ORIGINS.get(model, model).replace("/", "--") / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _row(cells: dict[str, str]) -> Row:
    precision = cells["precision"]
    quantization = cells["quantization"]
    return Row(
        id=cells["id"],
        model=cells["model"],
        method=cells["method"],  # type: ignore[arg-type]
        quantization="none" if quantization == "none" else "gptq" if "gptq" in quantization else "nf4",
        precision="bf16" if "bf16=True" in precision else "fp16" if "fp16=True" in precision else "no AMP",
        lora_targets=tuple(cells["lora_targets"].split()),
        lora_r=int(cells["lora_r"]) if cells["lora_r"] else None,
        batch_size=int(cells["batch_per_gpu"]),
        sequence_length=int(cells["sequence_length"]),
        gpus=int(cells["gpus"]),
        kernels=cells["kernels"],
        transformers=(4, 45) if "_liger.csv" in cells["source_url"] else (4, 48),
        peak_allocated_bytes=_number(cells["peak_allocated_bytes"]),
        end_allocated_bytes=_number(cells["end_allocated_bytes"]),
        nvidia_smi_mib=_number(cells["nvidia_smi_mib"]),
    )


def _number(text: str) -> int | None:
    """Memory that was not recorded stands as 0 or a few MiB."""
    return int(text) if text and int(text) > 1000 else None
