"""A base model's weights, loaded or drawn at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from brim.config import QuantizationConfig
from brim.errors import BrimError, ModelError, Problem
from brim.models.attention_choice import as_transformers_takes_it
from brim.models.bitsandbytes_import import require_bitsandbytes
from brim.models.folder import Initialize, ModelFolder
from brim.models.precision import cast_products
from brim.models.quantization import (
    comes_in_mxfp4,
    is_stored_quantised,
    quantization_for,
    settle_layers,
    without_quantization,
)
from brim.models.quiet import no_library_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 3  # a message names this many weights

# What transformers and safetensors raise over a damaged or foreign folder.
LOADING_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    ArithmeticError,
    OSError,
    RuntimeError,
    ImportError,
    AttributeError,
    AssertionError,
    SafetensorError,
    StrictDataclassError,
)

_OF_THE_CONFIGURATION = (
    StrictDataclassError,
    KeyError,
    TypeError,
    ArithmeticError,
    AttributeError,
    AssertionError,
)


def load_base(
    folder: ModelFolder,
    *,
    initialize: Initialize,
    dtype: torch.dtype | None,
    attn_implementation: str,
    trust_remote_code: bool,
    seed: int,
    device: torch.device,
    quantization: QuantizationConfig | None = None,
    products_dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A transformers causal language model on the device, in evaluation mode.

    dtype: of the weights; None keeps the stored one. With `initialize="random"` the weights are drawn from the seed.
    quantization: of the linear layers but the last; `dtype` is then that of embeddings, norms and the output layer.
    products_dtype: of the weights of linear layers, where it is another than `dtype`: see `cast_products`.
    Raises ModelError when the architecture is unknown, a weight is missing or damaged, or the folder asks for its own
    code to be run and `trust_remote_code` is off; BrimError when there is too little memory.
    """
    settings: dict[str, Any] = {
        "attn_implementation": as_transformers_takes_it(attn_implementation),
        "trust_remote_code": trust_remote_code,
    }
    if quantization is not None:
        require_bitsandbytes()
        settings["device_map"] = {"": str(device)}  # layers are quantised where they will stay
        if not is_stored_quantised(folder):
            settings["quantization_config"] = quantization_for(quantization)
    elif initialize == "pretrained" and comes_in_mxfp4(folder):
        from transformers import Mxfp4Config

        settings["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        with no_library_bars():
            if initialize == "random":
                model = _random(folder, dtype=dtype, seed=seed, settings=settings)
            else:
                model = _pretrained(folder, dtype=dtype, settings=settings)
        beyond = {} if products_dtype is None else cast_products(model, products_dtype)
        if beyond:
            raise ModelError(_beyond_range(beyond, cast(torch.dtype, products_dtype), folder))
        model = model.eval() if quantization is not None else model.to(device).eval()
    except (MemoryError, *LOADING_ERRORS) as error:
        if _is_out_of_memory(error):
            raise BrimError(_too_large(folder, device, quantization)) from error
        raise ModelError(explain(error, folder)) from error
    forget_generation_settings(model)
    if quantization is not None:
        settle_layers(model, quantization, device)
    return model


def forget_generation_settings(model: PreTrainedModel) -> None:
    """Keep only the special tokens: transformers fills every setting that ours leave open from the model's own."""
    from transformers import GenerationConfig

    own = model.generation_config
    if own is not None:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(own, name) for name in names})


def _random(folder: ModelFolder, *, dtype: torch.dtype | None, seed: int, settings: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = AutoConfig.from_pretrained(folder.name, trust_remote_code=settings["trust_remote_code"])
    without_quantization(architecture)  # new weights are not quantised, whatever the folder's own are
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(architecture, dtype=dtype or torch.float32, **settings)


def _pretrained(folder: ModelFolder, *, dtype: torch.dtype | None, settings: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder.name,
        dtype=dtype or "auto",
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported, and refused below with their names
        **settings,
    )
    # transformers would draw both at random and go on.
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    problems = []
    if missing:
        problems.append(_unfit(f"{_weights(len(missing))} missing: {_some(missing)}", folder))
    if mismatched:
        shapes = [f"{name} is {_shape(there)}, not {_shape(wanted)}" for name, there, wanted in mismatched]
        problems.append(
            _unfit(f"{_weights(len(mismatched))} of another shape than config.json says: {_some(shapes)}", folder)
        )
    if problems:
        raise ModelError(*problems)
    return model


def _beyond_range(beyond: Mapping[str, float], dtype: torch.dtype, folder: ModelFolder) -> Problem:
    shown = _some([f"{name} has {largest:,.0f}" for name, largest in sorted(beyond.items())])
    return Problem(
        what=f"weights are beyond what {str(dtype).removeprefix('torch.')} holds: {shown}",
        where=folder.name,
        expected=f"at most {torch.finfo(dtype).max:,.0f}, since precision computes in that",
        fix="set precision: fp32, or bf16-mixed on a GPU that has bfloat16",
    )


def _unfit(what: str, folder: ModelFolder) -> Problem:
    return Problem(
        what=what,
        where=folder.name,
        expected="weights that match config.json",
        fix="copy the folder anew, or check that it holds a causal language model",
    )


def _weights(count: int) -> str:
    return "1 weight of the base model is" if count == 1 else f"{count:,} weights of the base model are"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def _shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))


def _is_out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "can't allocate memory", "Cannot allocate memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(each in str(error) for each in words)


def _too_large(folder: ModelFolder, device: torch.device, quantization: QuantizationConfig | None) -> Problem:
    smaller = {None: "set quantization: {bits: 4}, ", 8: "set quantization.bits: 4, ", 4: ""}
    place = "this machine" if device.type == "cpu" else "the device"
    return Problem(
        what=f"the memory of {place} is too small for the base model",
        where=folder.name,
        fix=f"{smaller[quantization.bits if quantization else None]}choose a smaller base model, or end what else "
        "takes memory there",
    )


def explain(error: Exception, folder: ModelFolder) -> Problem:
    """What one of LOADING_ERRORS means for the user."""
    text = " ".join(str(error).split())
    kind = folder.config.get("model_type")
    if "trust_remote_code" in text:
        return Problem(
            what="the base model asks for its own code to be run",
            where=folder.name,
            fix="read that code; if you trust it, set `trust_remote_code: true`",
        )
    if "FlashAttention" in text:
        return Problem(
            what=f"the attention kernel that was asked for cannot be used: {text}",
            where="model_parameters.attn_implementation",
            fix="install it, or set `model_parameters.attn_implementation: auto`",
        )
    if "attention implementation" in text:
        return Problem(
            what=f"the architecture {kind!r} does not support the attention kernel that was asked for",
            where=folder.name,
            fix="set `model_parameters.attn_implementation: auto`",
        )
    if "model type" in text or "Unrecognized" in text:
        return Problem(
            what=f"the architecture {kind!r} is not a causal language model that this version of transformers knows",
            where=folder.name,
            fix="upgrade transformers, or choose another base model",
        )
    if isinstance(
        error, StrictDataclassError | KeyError | TypeError | ArithmeticError | AttributeError | AssertionError
    ):
        return Problem(
            what=f"config.json is damaged or does not fit: {text}",
            where=folder.name,
            fix="copy it from the original model again",
        )
    damaged = (
        "a safetensors file is damaged" if isinstance(error, SafetensorError) else "the base model cannot be loaded"
    )
    return Problem(
        what=f"{damaged}: {text}",
        where=folder.name,
        expected="whole safetensors files that match config.json",
        fix="copy the folder anew from where it came",
    )
