"""Write an adapter into the weights of its base, layer by layer: for good, as `brim export --merge` saves them, or for
a while, to generate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from brim.errors import ModelError, Problem
from brim.models.adapter_function import AdapterVariant

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel


def merge_adapter(model: PeftModel, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the base model with the adapter in its weights, all of `dtype` and none quantised. Uses the model up.

    Each layer is dequantised, merged in fp32 and cast before the next one is touched: beside the loaded model, which
    becomes the merged one meanwhile, this takes the memory of three copies of one layer in fp32.
    A weight that two layers share (an embedding and a head) is duplicated where the adapter changes one of the two.
    Raises ModelError for adapters other than LoRA, rsLoRA and DoRA on linear and embedding layers.
    """
    (adapter,) = model.peft_config  # brim puts one adapter on a model
    base = cast("PreTrainedModel", model.get_base_model())
    layers = list(_layers(base))
    for name, layer in layers:
        _require_known(name, layer, adapter)
    _part_shared_weights(base, [layer for _, layer in layers])
    with torch.no_grad():
        for name, layer in layers:
            base.set_submodule(name, _merged(layer, adapter, dtype))
        del layers
        _cast_parameters(base, dtype)
    quantizer = getattr(base, "hf_quantizer", None)
    if quantizer is not None:  # else it would not be saved as a plain model
        quantizer.remove_quantization_config(base)
    return base


class PassingMerge:
    """Compute with merged weights for a while: all of an adapter's layers, in the dtype of the base, or none of them.

    Meanwhile the base's own layers stand in the place of PEFT's, and no operator of the adapter runs.
    """

    def __init__(self, model: PeftModel) -> None:
        (self._adapter,) = model.peft_config
        self._base = cast("PreTrainedModel", model.get_base_model())
        self._layers = cast("list[tuple[str, LoraLayer]]", list(_layers(self._base)))

    @property
    def against(self) -> str:
        """Return why the adapter cannot be merged so; an empty text where it can."""
        from peft.tuners.lora import LoraLayer

        users = Counter(id(weight) for _, weight in self._base.named_parameters(remove_duplicate=False))
        for name, layer in self._layers:
            if not isinstance(layer, LoraLayer):
                return f"{name} is quantised" if _is_quantised(layer) else f"{name} is replaced as a whole"
            original = layer.get_base_layer()
            if _is_quantised(original):
                return f"{name} is quantised"
            try:
                _require_known(name, layer, self._adapter)
            except ModelError as error:
                return error.problems[0].what
            if users[id(original.weight)] > 1:
                return f"another layer shares the weight of {name}"
        return ""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of what is kept beside the merged weights: the base's own, and the adapter."""
        weights = (
            weight for _, layer in self._layers for name, weight in layer.named_parameters() if "bias" not in name
        )
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def working_bytes(self) -> int:
        """Return what merging takes while it goes on: three copies of the largest layer, in fp32."""
        return 3 * 4 * max(cast(Tensor, layer.get_base_layer().weight).numel() for _, layer in self._layers)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Let each layer compute with its merged weight, which is made anew for each call and not kept."""
        self._put([_AsMerged(layer, self._adapter) for _, layer in self._layers])
        try:
            yield
        finally:
            self._put([layer for _, layer in self._layers])

    @contextmanager
    def done(self, *, keeps: bool) -> Iterator[None]:
        """Merge the weights, and put them back to the bit. keeps: False: overwrite them, and leave them merged."""
        originals = [layer.get_base_layer() for _, layer in self._layers]
        before = [original.weight for original in originals]
        try:
            with torch.no_grad():
                for (_, layer), original in zip(self._layers, originals, strict=True):
                    weight = _merged_weight(layer, self._adapter)
                    if keeps:
                        original.weight = nn.Parameter(weight, requires_grad=False)
                    else:
                        original.weight.copy_(weight)
            self._put(originals)
            if not keeps:
                self._layers.clear()  # the adapter's memory is free now
            yield
        finally:
            for original, weight in zip(originals, before, strict=True):
                original.weight = weight
            self._put([layer for _, layer in self._layers])

    def _put(self, modules: list[Any]) -> None:
        for (name, _), module in zip(self._layers, modules, strict=True):
            self._base.set_submodule(name, module)


class _AsMerged(nn.Module):
    """Compute what a layer will once its adapter is merged."""

    def __init__(self, layer: LoraLayer, adapter: str) -> None:
        super().__init__()
        self._layer, self._adapter = cast(nn.Module, layer), adapter

    @property
    def weight(self) -> Tensor:
        """Return the merged one, with which some models compute by themselves, past the layer and its adapter."""
        return _merged_weight(cast("LoraLayer", self._layer), self._adapter)

    def __getattr__(self, name: str) -> Any:
        """Return what the base's layer has: a model may ask for its bias, or for its sizes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(cast(Any, super().__getattr__("_layer")).get_base_layer(), name)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the base's layer with the merged weight."""
        original = cast("LoraLayer", self._layer).get_base_layer()
        return functional_call(original, {"weight": self.weight}, inputs, options)


def _merged_weight(layer: LoraLayer, adapter: str) -> Tensor:
    """Return the weight with the adapter in it, as the base's layer stores its own."""
    original = layer.get_base_layer()
    weight = _updated(stored_weight(original), layer, adapter)
    return (weight.T if _is_transposed(original) else weight).to(cast(Tensor, original.weight).dtype).contiguous()


def stored_weight(layer: nn.Module) -> Tensor:
    """Return the weight [out, in] that a linear layer computes with, in fp32, dequantised where it is quantised.

    Transposed where transformers' Conv1D stores it [in, out]. An embedding's is [dimensions, vocabulary].
    """
    kind = type(layer).__name__
    weight = cast(Any, layer.weight)
    if kind == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).float()
    if kind == "Linear8bitLt":
        from bitsandbytes.functional import int8_vectorwise_dequant

        state = cast(Any, layer).state
        rows, scales = (weight.data, weight.SCB) if weight.SCB is not None else (state.CB, state.SCB)
        return cast(Tensor, int8_vectorwise_dequant(rows, scales).float())
    return cast(Tensor, weight.data.float().T if _is_transposed(layer) else weight.data.float())


def _merged(layer: nn.Module, adapter: str, dtype: torch.dtype) -> nn.Module:
    """Return a plain layer that computes what this one does."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(layer, ModulesToSaveWrapper):
        return cast(nn.Module, layer.modules_to_save[adapter])
    if not isinstance(layer, LoraLayer):
        return _plain(layer, stored_weight(layer), dtype)
    original = layer.get_base_layer()
    return _plain(original, _updated(stored_weight(original), layer, adapter), dtype)


def _updated(weight: Tensor, layer: LoraLayer, adapter: str) -> Tensor:
    """Add the adapter's update to the weight [out, in]. LoRA: W + s B A (Hu et al. 2021, arXiv 2106.09685).

    DoRA then scales each row to the learned length m: m (W + s B A) / |W + s B A| (Liu et al. 2024, arXiv 2402.09353).
    """
    down, up = _factors(layer, adapter)
    weight = torch.addmm(weight, up.to(weight), down.to(weight), alpha=layer.scaling[adapter])
    if adapter not in layer.lora_magnitude_vector:
        return weight
    lengths = torch.linalg.vector_norm(weight, dim=1)
    magnitudes = cast(Any, layer.lora_magnitude_vector[adapter]).weight.flatten().to(weight)
    return weight.mul_((magnitudes / lengths)[:, None])


def _factors(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r]."""
    if adapter in layer.lora_embedding_A:
        return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    return cast(Any, layer.lora_A[adapter]).weight, cast(Any, layer.lora_B[adapter]).weight


def _plain(original: nn.Module, weight: Tensor, dtype: torch.dtype) -> nn.Module:
    """Return a layer of the architecture's own kind, with this weight [out, in] and the original's bias."""
    from transformers.pytorch_utils import Conv1D

    if not _is_quantised(original):
        original.weight = _frozen(weight.T if _is_transposed(original) else weight, dtype)
        return original
    bias = cast("Tensor | None", original.bias)
    with torch.device("meta"):
        outputs, inputs = weight.shape
        # transformers' note of what was here before; without one it was a linear layer.
        transposed = getattr(original, "source_cls", nn.Linear) is Conv1D
        plain = Conv1D(outputs, inputs) if transposed else nn.Linear(inputs, outputs, bias=bias is not None)
    plain.weight = _frozen(weight.T if transposed else weight, dtype)
    if bias is not None:
        plain.bias = _frozen(bias.data, dtype)
    return plain.train(original.training)


def _frozen(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)


def _layers(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers to be replaced: adapted or quantised, each once and without what is inside it."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    inside: tuple[str, ...] = ()
    for name, module in base.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, LoraLayer | AuxiliaryTrainingWrapper) or _is_quantised(module):
            inside = (f"{name}.",)
            yield name, module


def _require_known(name: str, layer: nn.Module, adapter: str) -> None:
    """Raise ModelError for an adapter that this module has no formula for."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, LoraLayer):
        original = layer.get_base_layer()
        variant = layer.lora_variant.get(adapter, DoraLinearVariant())
        known = _is_quantised(original) or isinstance(original, nn.Linear | nn.Embedding | Conv1D)
        known = known and isinstance(variant, AdapterVariant | DoraLinearVariant | DoraEmbeddingVariant)
        if known and not layer.lora_bias[adapter]:
            return
        raise ModelError(_unmergeable(f"{name} ({type(original).__name__}, {type(layer).__name__})"))
    if isinstance(layer, AuxiliaryTrainingWrapper) and not isinstance(layer, ModulesToSaveWrapper):
        raise ModelError(_unmergeable(f"{name} ({type(layer).__name__})"))


def _unmergeable(layer: str) -> Problem:
    return Problem(
        what=f"the adapter cannot be merged: {layer} is adapted in a way that brim cannot write as plain weights",
        expected="LoRA, rsLoRA or DoRA on linear and embedding layers",
        fix="export the adapter without --merge, and open it with PEFT",
    )


def _part_shared_weights(base: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Give the output head a weight of its own where it shares one with an embedding and only one of them changes."""
    head, embedding = _inner(base.get_output_embeddings()), _inner(base.get_input_embeddings())
    if head is None or embedding is None or head.weight is not embedding.weight:
        return
    if any(_inner(layer) is head or _inner(layer) is embedding for layer in layers):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = base.config.get_text_config().tie_word_embeddings = False
        base.all_tied_weights_keys = {}


def _inner(layer: Any) -> Any:
    """Return the model's own layer, without the adapter around it; None for None."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(layer, BaseTunerLayer):
        return layer.get_base_layer()
    return layer.original_module if isinstance(layer, ModulesToSaveWrapper) else layer


def _cast_parameters(base: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what no adapter touched, except what the architecture wants in fp32."""
    kept = tuple(base._keep_in_fp32_modules_strict or ())
    for name, weight in base.named_parameters():
        wanted = torch.float32 if any(part in name for part in kept) else dtype
        if weight.is_floating_point() and weight.dtype != wanted:
            weight.data = weight.data.to(wanted)
        weight.requires_grad_(False)


def _is_quantised(layer: nn.Module) -> bool:
    """Compare names of types: bitsandbytes is imported only where it is used."""
    return type(layer).__name__ in ("Linear4bit", "Linear8bitLt") and type(layer).__module__.startswith("bitsandbytes")


def _is_transposed(layer: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D | nn.Embedding)
