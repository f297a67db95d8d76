"""Load a language model ready to work: base weights, adapter and precision, as the configuration says.

Whether the loss is computed in chunks depends on the configuration and on the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn

from brim.config import Choice
from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError
from brim.models.adapters import add_adapter, attention_choice, is_adapted
from brim.models.base import load_base, no_library_warnings, read_architecture
from brim.models.device import Precision, precision
from brim.models.dropout import RowDropout, drop_by_row
from brim.models.folders import ModelFolder
from brim.models.kernels import LayerKernels, execution_choices, layer_kernels
from brim.models.loss import LogitHead, NextToken, NoLogitHead, chunk_rows, logit_head
from brim.models.packing import PackedAttention
from brim.models.quantization import (
    taken_parts,
)
from brim.notes import Note, planned
from brim.units import format_bytes, format_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from brim.models.quantization import Cut

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LLM:
    """Hold the model and what is needed to run it."""

    model: PreTrainedModel  # or a PEFT model around one; it forwards and generates alike
    folder: ModelFolder
    device: torch.device
    precision: Precision
    objective: NextToken  # what is learned, and how its loss is computed
    row_dropout: RowDropout | None = None  # the adapter's dropout is drawn by row; None: as PyTorch draws it, or none
    packed: PackedAttention | None = None  # rows are packed; None: they are padded
    choices: tuple[Choice, ...] = ()  # what could only be chosen once the model was there
    parts: Mapping[tuple[nn.Module, str], torch.Tensor] = field(default_factory=dict)  # of weights that are on meta
    gathers: Callable[[Callable[[], Any]], Any] | None = None  # runs a pass of sharded weights; None: they are whole

    def run(self, work: Callable[[], T]) -> T:
        """Run a forward pass of the model, or of its parts."""
        if self.gathers is None:
            return work()
        done: T = self.gathers(work)
        return done

    @property
    def held_bytes(self) -> int:
        """Return the bytes of weights and buffers; of sharded ones, those that are here."""
        held: tuple[Any, ...] = (*self.model.parameters(), *self.model.buffers())
        parts = [each.to_local() if hasattr(each, "to_local") else each for each in held]
        return sum(each.numel() * each.element_size() for each in parts)


def model_note(config: Config, at: LLM | str, *, trains: bool) -> Note:
    """Say which model it is, what of it trains, in which precision it computes, and where.

    at: the model; or, while its weights are not there, the device's name.
    """
    path, method = Path(config.base_model), "" if config.adapter is None else f", {config.adapter.type}"
    name = "/".join(path.parts[-2:]) if path.is_dir() else config.base_model
    bits = "" if config.quantization is None else f" in {config.quantization.bits} bits"
    if isinstance(at, str):
        method = method or ", all weights train" * trains
        where = at if config.precision == "auto" else f"{config.precision} on {at}"
        return planned("model", f"{name}{bits}{method}; {where}")
    weights = [weight for name, weight in at.model.named_parameters() if not name.endswith(".absmax")]  # sharded scales
    held = sum(_num_elements(weight) for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    method = method if method and is_adapted(at.model) else ""  # which imports peft
    if trains:
        method = f"{method or ','} trains {'all' if trained == held else format_parameters(trained)}"
    where = f"{at.precision.name} on {at.device.type}"
    return planned("model", f"{name}, {format_parameters(held)} parameters{bits}{method}; {where}")


def _num_elements(weight: torch.Tensor) -> int:
    """Return a weight's elements; of one in 4 bits, which bitsandbytes packs into bytes, those that it stands for."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else math.prod(state.shape)


@no_library_warnings()
def load_llm(
    config: Config,
    folder: ModelFolder,
    device: torch.device,
    *,
    trainable: bool,
    keeps_digits: bool = False,
    at: torch.device | None = None,
    cut: Cut | None = None,
) -> LLM:
    """Load what the configuration names, to be trained or only to be run.

    config: resolved. keeps_digits: keep the weights' stored dtype, under autocast, too, for callers that read them.
    at: where the weights are loaded, if that is not yet the device. cut: returns the part of a quantised weight that is
    to be kept; None: all of it.
    Raises ModelError when the folder or the adapter does not hold what it should, ConfigError when the loss is to be
    computed in chunks and cannot be.
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
        device=at or device,
        quantization=config.quantization,
        cut=cut,
        products_dtype=kind.autocast_dtype if frozen and not keeps_digits else None,
    )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    read = partial(read_architecture, folder, trust_remote_code=config.trust_remote_code)
    at_hand = device if device.type == "cuda" else None
    choices = execution_choices(config, read, capability=capability, at_hand=at_hand, trains=trainable)
    config = Choice.made_in(config, choices)
    kernels = layer_kernels(config, read) if trainable else None
    llm = equip(model, config, folder, device, trainable=trainable, kernels=kernels)
    return llm if cut is None else replace(llm, parts=taken_parts(llm.model))


def equip(
    model: PreTrainedModel,
    config: Config,
    folder: ModelFolder,
    device: torch.device,
    *,
    trainable: bool,
    kernels: LayerKernels | None = None,
) -> LLM:
    """Give a base model, whose weights are there, all else that the configuration names.

    kernels: by which its layers compute; None: its own operators. Raises as `load_llm` does.
    """
    _forget_generation_settings(model)
    attention = attention_choice(config.model_parameters.attn_implementation, model)
    trainer = config.trainer if trainable and isinstance(config.trainer, FinetuneTrainer) else None
    if trainer is not None and trainer.enable_gradient_checkpointing not in ("auto", False):  # no plan: `auto` is off
        _checkpoint(model, cast(Any, trainer.enable_gradient_checkpointing))
    if kernels is not None:
        kernels.use(model)
    if config.adapter is not None and (trainable or config.adapter.pretrained_adapter_weights is not None):
        model = cast(Any, add_adapter(model, config.adapter, seed=config.random_seed, trainable=trainable))
    head, choices = chunked_head(config.trainer.chunked_loss, model)
    by_row = trainer is not None and trainer.dropout_by_row and config.adapter is not None
    is_packed = config.trainer.packing is True  # where it is not resolved, `auto` is off
    return LLM(
        model=model,
        folder=folder,
        device=device,
        precision=precision(cast(Any, config.precision)),
        objective=NextToken(head=head),
        row_dropout=drop_by_row(model, seed=config.random_seed) if by_row else None,
        packed=PackedAttention(model, is_cuda=device.type == "cuda") if is_packed else None,
        choices=(*attention, *choices),
    )


def _checkpoint(model: PreTrainedModel, layers: int) -> None:
    """Recompute activations: of all layers (True), or of so many first ones.

    The backward pass reaches the first layers last, when all that the others keep is gone, so that what it recomputes
    stands beside least. Raises ConfigError where there are fewer layers, or none that can be told from the others.
    """
    # transformers renamed the method; versions before that know only the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if layers is True:
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    those = [each for each in model.get_decoder().modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers <= len(those) == model.config.get_text_config().num_hidden_layers:
        raise ConfigError(
            what=f"{type(model).__name__} has fewer decoder layers that can be recomputed one by one",
            where="trainer.enable_gradient_checkpointing",
            expected="true, false, auto, or at most the number of its layers",
            fix="set it to true, or to a smaller number",
        )
    for layer in those[layers:]:
        layer.gradient_checkpointing = False


def _forget_generation_settings(model: PreTrainedModel) -> None:
    """Keep only the special tokens: transformers fills every setting that ours leave open from the model's own."""
    from transformers import GenerationConfig

    own = model.generation_config
    if own is not None:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(own, name) for name in names})


_KEY = "trainer.chunked_loss"


def chunked_head(setting: bool | Literal["auto"], model: nn.Module) -> tuple[LogitHead | None, tuple[Choice, ...]]:
    """Return the head with which the loss is computed in chunks, None where it is not; and what was chosen.

    setting: trainer.chunked_loss. Raises ConfigError when it is true and the model does not allow it.
    """
    if setting is False:
        return None, ()
    found = logit_head(model)
    if isinstance(found, NoLogitHead):
        if setting is True:
            what = f"{_KEY} is true, which this model does not allow: {found.reason}"
            raise ConfigError(what=what, where=_KEY, fix=f"set {_KEY}: auto")
        return None, (Choice(key=_KEY, value=False, reason=found.reason),)
    if setting is True:
        return found, ()
    vocabulary_size, weight = found.projection.out_features, found.projection.weight
    rows = chunk_rows(vocabulary_size, head_trains=weight.requires_grad)
    reason = f"logits of {rows:,} tokens at a time take {format_bytes(4 * rows * vocabulary_size)}"
    return found, (Choice(key=_KEY, value=True, reason=reason),)
