"""A language model ready to work: base weights, adapter and precision on a device, as the configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from brim.config import Choice, Config, FinetuneTrainer
from brim.models.adapters import add_adapter
from brim.models.attention_choice import attention_choice
from brim.models.folder import ModelFolder
from brim.models.load import load_base
from brim.models.logit_head import LogitHead
from brim.models.loss_choice import chunked_head
from brim.models.precision import Precision, precision
from brim.models.quiet import no_library_warnings
from brim.models.row_dropout import RowDropout, drop_by_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LLM:
    """The model and what is needed to run it."""

    model: PreTrainedModel  # or a PEFT model around one; it forwards and generates alike
    folder: ModelFolder
    device: torch.device
    precision: Precision
    head: LogitHead | None = None  # the loss is computed in chunks; None: all logits stand at once
    row_dropout: RowDropout | None = None  # the adapter's dropout is drawn by row; None: as PyTorch draws it, or none
    choices: tuple[Choice, ...] = ()  # what could only be chosen once the model was there


@no_library_warnings()
def load_llm(
    config: Config, folder: ModelFolder, device: torch.device, *, trainable: bool, keeps_digits: bool = False
) -> LLM:
    """Load what the configuration names, to be trained or only to be run.

    config: resolved. keeps_digits: of the weights as they are stored, under autocast, too; for those who want the
    weights themselves. Raises ModelError when the folder or the adapter does not hold what it should, ConfigError when
    the loss is to be computed in chunks and cannot be.
    """
    kind = precision(cast(Any, config.precision))
    assert not trainable or config.quantization is None or config.adapter is not None, "see require_trainable"
    frozen = config.adapter is not None or not trainable
    model = load_base(
        folder,
        initialize=config.initialize,
        dtype=kind.weights_dtype(frozen=frozen),
        attn_implementation=config.model_parameters.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        seed=config.random_seed,
        device=device,
        quantization=config.quantization,
        products_dtype=kind.autocast_dtype if frozen and not keeps_digits else None,
    )
    return equip(model, config, folder, device, trainable=trainable)


def equip(model: PreTrainedModel, config: Config, folder: ModelFolder, device: torch.device, *, trainable: bool) -> LLM:
    """Give a base model, whose weights are there, all else that the configuration names.

    Raises as `load_llm` does.
    """
    attention = attention_choice(config.model_parameters.attn_implementation, model)
    trainer = config.trainer if trainable and isinstance(config.trainer, FinetuneTrainer) else None
    if trainer is not None and trainer.enable_gradient_checkpointing is True:  # without a plan, `auto` is off
        _checkpoint_activations(model)
    if config.adapter is not None and (trainable or config.adapter.pretrained_adapter_weights is not None):
        model = cast(Any, add_adapter(model, config.adapter, seed=config.random_seed, trainable=trainable))
    head, choices = chunked_head(config.trainer.chunked_loss, model)
    by_row = trainer is not None and trainer.dropout_by_row and config.adapter is not None
    return LLM(
        model=model,
        folder=folder,
        device=device,
        precision=precision(cast(Any, config.precision)),
        head=head,
        row_dropout=drop_by_row(model, seed=config.random_seed) if by_row else None,
        choices=(*attention, *choices),
    )


def _checkpoint_activations(model: PreTrainedModel) -> None:
    # transformers renamed the method; versions before that know only the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
