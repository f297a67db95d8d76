"""A base model's weights, loaded or drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from brim.errors import ModelError, Problem
from brim.models.folder import Initialize, ModelFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MISSING_SHOWN = 3


def load_base(
    folder: ModelFolder,
    *,
    initialize: Initialize,
    dtype: torch.dtype | None,
    attn_implementation: str,
    trust_remote_code: bool,
    seed: int,
    device: torch.device,
) -> PreTrainedModel:
    """A transformers causal language model on the device, in evaluation mode.

    dtype: of the weights; None keeps the stored one. With `initialize="random"` the weights are drawn from the seed.
    Raises ModelError when the architecture is unknown, a weight is missing or damaged, or the folder asks for its own
    code to be run and `trust_remote_code` is off.
    """
    settings: dict[str, Any] = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    try:
        with _quiet():
            if initialize == "random":
                model = _random(folder, dtype=dtype, seed=seed, settings=settings)
            else:
                model = _pretrained(folder, dtype=dtype, settings=settings)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise ModelError(_explain(error, folder)) from error
    return model.to(device).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars, which are put back as they were."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _random(folder: ModelFolder, *, dtype: torch.dtype | None, seed: int, settings: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = AutoConfig.from_pretrained(folder.name, trust_remote_code=settings["trust_remote_code"])
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(architecture, dtype=dtype or torch.float32, **settings)


def _pretrained(folder: ModelFolder, *, dtype: torch.dtype | None, settings: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder.name, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True, **settings
    )
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would draw them at random and go on.
        raise ModelError(
            Problem(
                what=f"{len(missing)} weights of the base model are missing: {', '.join(missing[:_MISSING_SHOWN])} …",
                where=folder.name,
                expected="weights that match config.json",
                fix="copy the folder anew, or check that it holds a causal language model",
            )
        )
    return model


def _explain(error: Exception, folder: ModelFolder) -> Problem:
    text = str(error).strip().split("\n")[0]
    kind = folder.config.get("model_type")
    if "trust_remote_code" in str(error):
        return Problem(
            what="the base model asks for its own code to be run",
            where=folder.name,
            fix="read that code; if you trust it, set `trust_remote_code: true`",
        )
    if "attention implementation" in text:
        return Problem(
            what=f"the architecture {kind!r} does not support the attention kernel that was asked for",
            where=folder.name,
            fix="set `model_parameters.attn_implementation: eager`",
        )
    if "model type" in text or isinstance(error, KeyError) or "Unrecognized" in text:
        return Problem(
            what=f"the architecture {kind!r} is not a causal language model that transformers knows: {text}",
            where=folder.name,
            fix="upgrade transformers, or choose another base model",
        )
    return Problem(
        what=f"the base model cannot be loaded: {text}",
        where=folder.name,
        expected="whole safetensors files that match config.json",
        fix="copy the folder anew from where it came",
    )
