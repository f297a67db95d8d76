"""Trace a measured run: the same model, with what the older libraries and kernels did otherwise.

The runs: scripts/benchmarks of foundation-model-stack/fms-acceleration (24bdadb, 733992a), which start fms-hf-tuning's
sft_trainer: TRL's SFTTrainer over packed rows, one micro-batch a step, reentrant activation checkpointing, clipping at
1.0, AdamW (foreach). What it all allocates is in docs/decisions/0009-what-the-public-runs-show.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks.memory_public import losses, triton_kernels
from benchmarks.memory_public.fused_lora import dequantize_4bit, fuse
from benchmarks.memory_public.gptq import dequantize_gptq, quantize_gptq
from benchmarks.memory_public.rows import Row
from brim.config.schema import QuantizationConfig
from brim.memory.bitsandbytes import quantize_stand_in
from brim.memory.cuda import CudaTarget, FlashAttnPackage, as_on_cuda, cuda_temporaries, foreach_as_on_cuda
from brim.memory.events import EventStream
from brim.memory.loading import LoadedTensor, LoadKind, loaded_tensors, of_all_layers, with_loading
from brim.memory.trace import Recording, Training, Workload

if TYPE_CHECKING:
    from transformers import PretrainedConfig

A100 = CudaTarget(compute_capability=(8, 0), torch_version=(2, 4), multiprocessors=108)
BITSANDBYTES = (0, 43)


class NotTracedError(Exception):
    """Say that a run has no counterpart here."""


class MeasuredRun:
    """Hold a row's model and its steps. Raises NotTracedError for GPTQ with FSDP."""

    def __init__(self, row: Row) -> None:
        if row.quantization == "gptq" and row.gpus > 1:
            raise NotTracedError(f"{row.id}: {row.kernels}")
        self._row = row
        self._loaded: list[LoadedTensor] = []

    def workload(self) -> Workload:
        """Return one optimizer step."""
        row = self._row
        return Workload(
            architecture=_architecture(row),
            build=self._build,
            batch=_batch,
            training=Training(
                micro_batch=lambda model, batch: _micro_batch(model, batch, row),
                optimizer=_optimizer,
                update=_update,
                accumulates=False,
            ),
            view=lambda model: _view(model, row),
            temporaries=cuda_temporaries,
        )

    def with_loading(self, stream: EventStream, recording: Recording) -> EventStream:
        """The stream with the load of the weights; before transformers 4.50 there was no warming up of the cache."""
        depth = recording.depth
        tensors = self._loaded
        if depth.num_recorded < depth.num_layers:
            tensors = of_all_layers(
                tensors, layers_path=recording.layers_path, num_layers=depth.num_layers, template=depth.template
            )
        kind: LoadKind = "quantized" if self._row.quantization == "nf4" else "moved"
        return with_loading(stream, tensors, kind, has_warmup=False)

    def _build(self, config: PretrainedConfig) -> nn.Module:
        row = self._row
        dtype = torch.float16 if row.precision == "fp16" else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        if row.quantization == "gptq":
            with torch.device("meta"):
                quantize_gptq(model, row.group_size)
        if row.quantization == "nf4":
            four_bits = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16")
            storage = torch.uint8 if row.gpus == 1 else torch.bfloat16  # so that FSDP can cut it
            quantize_stand_in(model, four_bits, release=BITSANDBYTES, quant_storage=storage, scales_are_sharded=False)
        if row.prepared_for_kbit and row.gpus == 1:
            _raise_norms(model)
        self._loaded = loaded_tensors(model, arriving_bytes=2 if row.quantization == "nf4" else None)
        return _equipped(model, row)


def _equipped(model: Any, row: Row) -> nn.Module:
    """Return the model with adapter, checkpointing, loss and kernels of the run."""
    built: nn.Module = model
    if row.method != "full":
        model.requires_grad_(False)
        model.enable_input_require_grads()
        built = get_peft_model(model, _lora(row))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})
    _give_loss(model, row)
    if row.loss != "stock" and row.quantization != "none":
        fuse(built, dequantize_4bit if row.quantization == "nf4" else dequantize_gptq)
    return built.train()


def _architecture(row: Row) -> PretrainedConfig:
    architecture = deepcopy(row.architecture)
    architecture.use_cache = False
    return architecture


def _lora(row: Row) -> LoraConfig:
    return LoraConfig(
        r=row.lora_r or 0,
        lora_alpha=16,
        lora_dropout=0.1,
        target_modules=list(row.lora_targets),
        task_type="CAUSAL_LM",
    )


def _raise_norms(model: nn.Module) -> None:
    """Do what is left of two casts: PEFT's prepare_model_for_kbit_training raises what is not quantised to fp32, and
    TRL's peft_module_casting_to_bf16 lowers embeddings and head again."""
    for name, module in model.named_modules():
        if "norm" in name:
            module.to(torch.float32)


def _give_loss(model: Any, row: Row) -> None:
    """transformers before 4.46 raised the logits to fp32 right after the head; GPT-BigCode never did."""
    if row.loss == "liger":
        model.forward = MethodType(_liger_forward, model)
        return
    narrow = model.config.model_type == "gpt_bigcode"
    model.loss_function = {
        ("stock", False): losses.causal_lm_loss,
        ("triton", False): losses.triton_causal_lm_loss,
        ("stock", True): losses.narrow_loss,
        ("triton", True): losses.triton_narrow_loss,
    }[row.loss, narrow]
    if row.transformers < (4, 46) and not narrow:
        model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.float())


def _liger_forward(self: Any, input_ids: Tensor, labels: Tensor, **_: Any) -> CausalLMOutputWithPast:
    hidden_states = self.model(input_ids=input_ids).last_hidden_state
    return CausalLMOutputWithPast(loss=losses.liger_loss(self, hidden_states, labels))


def _batch(rows: int, tokens: int) -> dict[str, Tensor]:
    """Without memory of its own: the trainer's loop holds a batch all the time; predict.py counts it."""
    one = torch.zeros(1, dtype=torch.int64)
    return {"input_ids": one.expand(rows, tokens), "labels": one.expand(rows, tokens)}


def _micro_batch(model: nn.Module, batch: dict[str, Tensor], row: Row) -> None:
    with _cached_keys(model):
        loss = _loss(model, batch, row)
    loss.backward()  # type: ignore[no-untyped-call]


def _loss(model: nn.Module, batch: dict[str, Tensor], row: Row) -> Tensor:
    """Raise the outputs to fp32 on leaving the model, as accelerate does under autocast (convert_outputs_to_fp32)."""
    if row.precision == "no AMP":
        loss: Tensor = model(**batch).loss
        return loss
    with torch.autocast("cpu", dtype=torch.float16 if row.precision == "fp16" else torch.bfloat16):
        output = model(**batch)
    if output.logits is not None:
        output.logits = output.logits.float()
    raised: Tensor = output.loss
    return raised


@contextmanager
def _cached_keys(model: nn.Module) -> Iterator[None]:
    """GPT-BigCode of 4.48 keeps keys and values for generation even under checkpointing (`presents`).

    They are views of c_attn's output, whole until the model's output is dropped.
    """
    kept: list[Tensor] = []
    projections = [module for name, module in model.named_modules() if name.endswith(".attn.c_attn")]
    hooks = [module.register_forward_hook(lambda module, inputs, output: kept.append(output)) for module in projections]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        kept.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RepeatingFlash(FlashAttnPackage):
    """Repeat keys and values for each query head, as Mistral's attention of transformers 4.45 does."""

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        k, v = (_repeat(each, q.shape[2] // each.shape[2]) for each in (k, v))
        return FlashAttnPackage.flash_attn_func(self, q, k, v, *args, **kwargs)


def _repeat(states: Tensor, times: int) -> Tensor:
    """repeat_kv: [B, S, K, D] laid out as [B, K, S, D]."""
    return states.transpose(1, 2).repeat_interleave(times, dim=1).transpose(1, 2)


def _package(row: Row) -> FlashAttnPackage:
    repeats = row.transformers < (4, 46) and row.architecture.model_type == "mistral"
    return (_RepeatingFlash if repeats else FlashAttnPackage)(target=A100)


@contextmanager
def _view(model: nn.Module | None, row: Row) -> Iterator[None]:
    with ExitStack() as stack:
        if model is None:
            stack.enter_context(foreach_as_on_cuda())
        else:
            base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
            stack.enter_context(as_on_cuda(base, A100, flash_attention=_package(row)))
            if row.loss != "stock":
                _patch_kernels(base, stack)
        yield


def _patch_kernels(base: Any, stack: ExitStack) -> None:
    """Give the architecture's module the Triton kernels, in the place of those functions that it has."""
    module = sys.modules[type(base).__module__]
    if hasattr(module, "apply_rotary_pos_emb"):
        stack.enter_context(patch.object(module, "apply_rotary_pos_emb", triton_kernels.apply_rotary))
    for name, norm in vars(module).items():
        if name.endswith("RMSNorm") and isinstance(norm, type):
            stack.enter_context(patch.object(norm, "forward", triton_kernels.rms_norm))


def _optimizer(weights: Sequence[Parameter]) -> Optimizer:
    return AdamW(weights, lr=2e-5, eps=1e-4, weight_decay=0.01, foreach=True)


def _update(weights: Sequence[Parameter], optimizer: Optimizer) -> None:
    clip_grad_norm_(weights, 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
