"""Trace the Answer.AI runs: QLoRA and LoRA with FSDP1 on two GPUs, as AnswerDotAI/fsdp_qlora's train.py (05ed9f2).

Pure bf16, adapters too; SDPA; reentrant activation checkpointing within FSDP's units; AdamW (foreach), no clipping;
rows of one length. Its libraries: torch 2.2, transformers 4.38, bitsandbytes 0.43. The loop keeps the model's output,
and with it the fp32 logits, until the optimizer has stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig

from benchmarks.memory_public import losses
from benchmarks.memory_public.rows import DATA, Cells, architecture_of, read_table
from brim import InputError
from brim.config.schema import QuantizationConfig
from brim.memory.bitsandbytes import quantize_stand_in
from brim.memory.cuda import CudaTarget, as_on_cuda, foreach_as_on_cuda
from brim.memory.devices import Device, find_device
from brim.memory.fsdp import Sharding
from brim.memory.trace import Training, Workload

GPU = CudaTarget(compute_capability=(8, 6), torch_version=(2, 2), multiprocessors=82)  # RTX 3090; a 4090 has 8.9
BITSANDBYTES = (0, 43)
_GIB = 2**30
TARGETS = ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj")

ARCHITECTURES: dict[str, PretrainedConfig] = {
    "Llama-2-7B": LlamaConfig(vocab_size=32_000, max_position_embeddings=4096),
    "Mistral-7B-v0.2": MistralConfig(vocab_size=32_000, sliding_window=None),
    "Yi-34B": LlamaConfig(
        vocab_size=64_000,
        hidden_size=7168,
        intermediate_size=20_480,
        num_hidden_layers=60,
        num_attention_heads=56,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """Hold one run of `gpu_memory_other.csv`."""

    id: str
    model: str
    architecture: PretrainedConfig = field(repr=False, compare=False)  # with the vocabulary of the run
    quantized: bool
    batch_size: int
    sequence_length: int
    lora_r: int
    device: Device
    strategy: Literal["cut", "cut, on the CPU", "whole"]
    metric: Literal["reserved", "allocated"]
    measured_bytes: int


NAME = "gpu_memory_other.csv"
_COLUMNS = (
    *("id", "model", "method", "lora_r", "batch_per_gpu", "seq_len", "gpus", "sharding"),
    *("metric", "value_gib_or_gb"),
)


def read_answer_rows(data: Path = DATA) -> list[AnswerRow]:
    """Return the runs of two GPUs and dummy data of fixed length: those whose id begins with ANSWER.

    Raises InputError where they cannot be read.
    """
    return read_table(data, NAME, _COLUMNS, partial(_row, data))


def _row(data: Path, cells: Cells) -> AnswerRow | None:
    if not cells.text("id").startswith("ANSWER"):
        return None
    architecture = architecture_of(data, cells, known=ARCHITECTURES)
    if cells.text("vocabulary_size"):
        architecture.vocab_size = cells.number("vocabulary_size", int)
    sharding = cells.text("sharding")
    return AnswerRow(
        id=cells.text("id"),
        model=cells.text("model"),
        architecture=architecture,
        quantized=cells.text("method") == "qlora",
        batch_size=cells.number("batch_per_gpu", int),
        sequence_length=cells.number("seq_len", int),
        lora_r=cells.number("lora_r", int),
        device=cells.read("gpus", _device, "two of a GPU that brim knows, such as 2xRTX3090"),
        strategy="whole" if "ddp" in sharding else "cut, on the CPU" if "CPU" in sharding else "cut",
        metric=cells.one_of("metric", "reserved", "allocated"),
        measured_bytes=round(cells.number("value_gib_or_gb", float) * _GIB),
    )


def _device(text: str) -> Device:
    """Return the card that a cell names. Raises ValueError."""
    count, _, name = text.partition("x")
    if count != "2":
        raise ValueError(text)
    try:
        return find_device(name)
    except InputError as error:
        raise ValueError(text) from error


def sharding_of_answer(row: AnswerRow) -> Sharding:
    """No mixed precision: all is in bf16."""
    return Sharding(
        world_size=1 if row.strategy == "whole" else 2,
        kind="fsdp1",
        offload="weights" if row.strategy == "cut, on the CPU" else "none",
    )


def answer_workload(row: AnswerRow) -> Workload:
    """Return one optimizer step of the run."""
    kept: list[Any] = []
    return Workload(
        architecture=row.architecture,
        build=partial(_build, row),
        batch=_batch,
        training=Training(
            micro_batch=partial(_micro_batch, kept), optimizer=_optimizer, update=_update, accumulates=False
        ),
        view=_view,
    )


def _build(row: AnswerRow, architecture: PretrainedConfig) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    if row.quantized:
        four_bits = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16")
        quantize_stand_in(
            model, four_bits, release=BITSANDBYTES, quant_storage=torch.bfloat16, scales_are_sharded=False
        )
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.loss_function = losses.causal_lm_loss
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.float())
    for layer in model.model.layers:
        layer.forward = partial(_checkpointed, layer.forward)
    adapter = LoraConfig(
        r=row.lora_r, lora_alpha=16, lora_dropout=0.1, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    built: nn.Module = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    return built.to(torch.bfloat16).train()


def _checkpointed(forward: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), hidden_states, use_reentrant=True)


def _batch(rows: int, tokens: int) -> dict[str, Tensor]:
    return {name: torch.zeros(rows, tokens, dtype=torch.int64) for name in ("input_ids", "labels")}


def _micro_batch(kept: list[Any], model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Run one micro-batch, whose output outlives the backward pass."""
    output = model(**batch)
    kept[:] = [output.logits]
    output.loss.backward()
    kept.clear()


@contextmanager
def _view(model: Any) -> Iterator[None]:
    if model is None:
        with foreach_as_on_cuda():
            yield
        return
    with as_on_cuda(model.get_base_model(), GPU):
        yield


def _optimizer(weights: Sequence[Parameter]) -> Optimizer:
    return AdamW(weights, lr=1e-5, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1, foreach=True)


def _update(weights: Sequence[Parameter], optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
