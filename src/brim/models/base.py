"""Read a base model from its folder, or draw it at random, and say in plain words what is wrong with one.

What libraries say to programmers is silenced: progress bars that would appear between brim's own, and warnings of
their own code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from brim import lazy
from brim.batching.memory import is_out_of_memory
from brim.config.schema import QuantizationConfig
from brim.errors import BrimError, ModelError, Problem
from brim.models.device import cast_products
from brim.models.folders import Initialize, ModelFolder
from brim.models.quantization import (
    cut_as_read,
    quantization_for,
    require_bitsandbytes,
    settle_layers,
    without_quantization,
)
from brim.units import format_count

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from brim.models.quantization import Cut

_SHOWN = 3  # a message names this many weights


# What transformers raises over values of config.json.
_OF_CONFIG_JSON = (StrictDataclassError, KeyError, TypeError, ArithmeticError, AttributeError, AssertionError)


# What transformers and safetensors raise over a damaged or foreign folder.
LOADING_ERRORS = (*_OF_CONFIG_JSON, ValueError, OSError, RuntimeError, ImportError, SafetensorError)


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
    cut: Cut | None = None,
    products_dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load a causal language model of transformers onto the device, in evaluation mode.

    dtype: of the weights; None keeps the stored one. With `initialize="random"` the weights are drawn from the seed.
    quantization: of the linear layers but the last; `dtype` is then that of embeddings, norms and the output layer.
    cut: of each quantised weight, the part that is kept; None: all of it.
    products_dtype: of the weights of linear layers, where it is another than `dtype`: see `cast_products`.
    Raises ModelError when the architecture is unknown, a weight is missing or damaged, or the folder asks for its own
    code to be run and `trust_remote_code` is off; BrimError when there is too little memory.
    """
    settings: dict[str, Any] = {
        # With None, transformers takes sdpa where the architecture has it, else eager.
        "attn_implementation": None if attn_implementation == "auto" else attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    if quantization is not None:
        require_bitsandbytes()
        settings["device_map"] = {"": str(device)}  # layers are quantised where they will stay
        if not folder.is_quantised:
            settings["quantization_config"] = quantization_for(quantization)
    elif initialize == "pretrained" and folder.comes_in_mxfp4:
        from transformers import Mxfp4Config

        settings["quantization_config"] = Mxfp4Config(dequantize=True)
    elif device.type == "cuda" and initialize == "pretrained" and folder.stays_as_read(dtype, products_dtype):
        settings["device_map"] = {"": str(device)}
    try:
        with lazy.importing():
            from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401 - which loading asks for
        lazy.freezes_imports = False  # circles that hold tensors are to be found
        with no_library_bars(), cut_as_read(cut):
            if initialize == "random":
                model = _random(folder, dtype=dtype, seed=seed, settings=settings)
            else:
                model = _pretrained(folder, dtype=dtype, settings=settings)
        beyond = {} if products_dtype is None else cast_products(model, products_dtype)
        if beyond:
            raise ModelError(_beyond_range(beyond, cast(torch.dtype, products_dtype), folder))
        model = model.eval() if quantization is not None else model.to(device).eval()
    except (MemoryError, *LOADING_ERRORS) as error:
        if is_out_of_memory(error):
            raise BrimError(_too_large(folder, device, quantization)) from error
        raise ModelError(explain(error, folder)) from error
    if quantization is not None:
        settle_layers(model, quantization, device)
    return model


def read_architecture(folder: ModelFolder, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read a folder's config.json as transformers' configuration. Raises ModelError when transformers cannot."""
    from transformers import AutoConfig

    try:
        with lazy.importing():
            architecture = AutoConfig.from_pretrained(folder.path, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ModelError(explain(error, folder)) from error
    without_quantization(architecture)
    return architecture


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
    shapes = [
        f"{name} is {'×'.join(map(str, there))}, not {'×'.join(map(str, wanted))}"
        for name, there, wanted in sorted(report["mismatched_keys"])
    ]
    misfits = {"missing": sorted(report["missing_keys"]), "of another shape than config.json says": shapes}
    problems = [
        Problem(
            what=f"{format_count(len(names), *_WEIGHTS)} {wrong}: {_some(names)}",
            where=folder.name,
            expected="weights that match config.json",
            fix="copy the folder again, or check that it holds a causal language model",
        )
        for wrong, names in misfits.items()
        if names
    ]
    if problems:
        raise ModelError(*problems)
    return model


_WEIGHTS = ("weight of the base model is", "weights of the base model are")


def _beyond_range(beyond: Mapping[str, float], dtype: torch.dtype, folder: ModelFolder) -> Problem:
    shown = _some([f"{name} has {largest:,.0f}" for name, largest in sorted(beyond.items())])
    return Problem(
        what=f"weights are beyond what {str(dtype).removeprefix('torch.')} holds: {shown}",
        where=folder.name,
        expected=f"at most {torch.finfo(dtype).max:,.0f}, since precision computes in that",
        fix="set precision: fp32, or bf16-mixed on a GPU that has bfloat16",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


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
    """Say what one of LOADING_ERRORS means for the user."""
    text = " ".join(str(error).split())
    kind = folder.config.get("model_type")
    where, expected = folder.name, ""
    if "trust_remote_code" in text:
        what = "the base model asks for its own code to be run"
        fix = "read that code; if you trust it, set `trust_remote_code: true`"
    elif "FlashAttention" in text:
        what = f"the attention kernel that was asked for cannot be used: {text}"
        where = "model_parameters.attn_implementation"
        fix = "install it, or set `model_parameters.attn_implementation: auto`"
    elif "attention implementation" in text:
        what = f"the architecture {kind!r} does not support the attention kernel that was asked for"
        fix = "set `model_parameters.attn_implementation: auto`"
    elif "model type" in text or "Unrecognized" in text:
        what = f"the architecture {kind!r} is not a causal language model that this version of transformers knows"
        fix = "upgrade transformers, or choose another base model"
    elif isinstance(error, _OF_CONFIG_JSON):
        what = f"config.json is damaged or does not fit: {text}"
        fix = "copy it from the original model again"
    else:
        is_damaged = isinstance(error, SafetensorError)
        what = f"{'a safetensors file is damaged' if is_damaged else 'the base model cannot be loaded'}: {text}"
        expected = "whole safetensors files that match config.json"
        fix = "copy the folder again from its source"
    return Problem(what=what, where=where, expected=expected, fix=fix)


_LIBRARIES = "accelerate|bitsandbytes|datasets|huggingface_hub|peft|tokenizers|torch|transformers"


_WARN_OF_SETTINGS = "peft|transformers"  # in plain UserWarnings, of settings that brim has chosen


@contextmanager
def no_library_warnings() -> Iterator[None]:
    """Hide libraries' warnings that what they, or brim, call will change: a user can do nothing about them.

    Warnings of other modules, the user's own among them, are shown as before; afterwards all are.
    """
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"({_LIBRARIES}|brim)(\.|$)")
        warnings.filterwarnings("ignore", category=UserWarning, module=rf"({_WARN_OF_SETTINGS})(\.|$)")
        yield


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Hide transformers' progress bars, and restore the setting afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
