"""Quantise base models in 4 or 8 bits through bitsandbytes, and read what a folder holds already.

Importing this module imports neither torch nor bitsandbytes. bitsandbytes is used without its messages, without code
from the Hub, and corrected where it would be wrong on a CPU.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from unittest.mock import patch

from brim.config import Choice
from brim.config.schema import Config, QuantizationConfig
from brim.errors import ModelError, Problem
from brim.models.folders import QUANTIZATION, ModelFolder

if TYPE_CHECKING:
    import torch
    from bitsandbytes.nn.modules import Linear8bitLt
    from torch import nn
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

    Cut: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # returns a part of a tensor, in memory of its own


def require_bitsandbytes() -> None:
    """Import bitsandbytes, or take it as it is imported already.

    Raises ModelError, with the command that installs it.
    """
    log = logging.getLogger("bitsandbytes")
    if log.level == logging.NOTSET:  # else the user wants a message for each cast, in every layer and step
        log.setLevel(logging.ERROR)
    try:
        _import()
    except (ImportError, OSError, RuntimeError) as error:  # the package, a library of its own, one of its backends
        raise ModelError(
            what=f"bitsandbytes, which quantises, cannot be imported: {' '.join(str(error).split())}",
            fix="install it with `pip install 'brim[quantization]'`, or remove quantization and 8-bit or paged "
            "optimizers",
        ) from error
    _mend_dequantization()


def _import() -> None:
    """Import it with the package `kernels` hidden from it, and without PyTorch's compiler until that is needed.

    On CPUs with AVX512-BF16 it would have that package fetch native code from the Hub and run it, unasked. What needs
    that code is switched off (see `settle_layers`). The compiler takes more than a second to import, for four
    functions that most runs never call.
    """
    if sys.modules.get("bitsandbytes") is not None:
        return
    import torch

    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kernels"}
    sys.modules.update(dict.fromkeys({"kernels", *hidden}))  # type: ignore[arg-type]
    try:
        with patch.object(torch, "compile", partial(_compiled_when_called, torch.compile)):
            import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hidden)


def _compiled_when_called(
    compiler: Callable[..., Any], function: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """Return the function, which the compiler compiles at the first call."""
    compiled = cache(partial(compiler, function, **options))

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


@cache
def _mend_dequantization() -> torch.library.Library:
    """Have 4-bit weights dequantised block by block, where a row is not a whole number of blocks.

    bitsandbytes (0.50 at least) counts blocks by row on CPUs with AVX-512, and takes the scales of other blocks then:
    a layer of 688 inputs comes out quite wrong, without a message. Its GPU kernels are right. Returns what must be kept
    alive.
    """
    import torch

    theirs = torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU")

    def dequantize(
        keys: torch._C.DispatchKeySet,
        packed: torch.Tensor,
        scales: torch.Tensor,
        blocksize: int,
        kind: str,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        rows = list(shape)
        if shape[-1] % blocksize:
            size = prod(shape)  # each core works on rows of its own
            rows = [1, size] if size % blocksize else [size // blocksize, blocksize]
        weight: torch.Tensor = theirs.call_boxed(keys, packed, scales, blocksize, kind, rows, dtype)
        return weight.reshape(list(shape))

    library = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl(  # type: ignore[no-untyped-call]
            "dequantize_4bit", dequantize, "CPU", with_keyset=True, allow_override=True
        )
    return library


_STORED = ("bits", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type")  # the other keys say how layers compute


def with_stored_quantization(config: Config, folder: ModelFolder) -> Config:
    """Return the configuration with the quantization that the base model is stored in; what is open is filled in.

    Raises ModelError where the folder is quantised otherwise than the configuration says, or by another library.
    """
    if folder.comes_in_mxfp4 and config.initialize != "random" and config.quantization is not None:
        raise ModelError(
            what=f"quantization.bits is {config.quantization.bits}, and the base model's experts are stored in mxfp4, "
            "which is dequantised as it is loaded",
            where=folder.name,
            expected="no quantization: bitsandbytes takes linear layers alone, and the experts' weights are in none",
            fix="take quantization out of the configuration; where 16 bits are too much, choose a smaller base model",
        )
    if not folder.is_quantised or config.initialize == "random":
        return config
    stored = _stored(folder)
    given = config.quantization
    if given is None:
        return config.model_copy(update={"quantization": stored})
    own = {key: getattr(given, key) for key in given.model_fields_set}
    differing = [
        Problem(
            what=f"quantization.{key} is {str(own[key]).lower()}, and the base model's weights are stored with "
            f"{str(getattr(stored, key)).lower()}",
            where=folder.name,
            fix=f"take quantization.{key} out of the configuration, or start from weights that are not quantised",
        )
        for key in (_STORED if stored.bits == 4 else ("bits",))
        if key in own and own[key] != getattr(stored, key)
    ]
    if differing:
        raise ModelError(*differing)
    return config.model_copy(update={"quantization": stored.model_copy(update=own)})


def stored_choices(config: Config, folder: ModelFolder) -> list[Choice]:
    """Say what becomes of weights that are stored otherwise than they are loaded."""
    if not folder.comes_in_mxfp4 or config.initialize == "random":
        return []
    reason = "stored in mxfp4, whose 4-bit blocks do not train: the experts take as much as in a model of 16 bits"
    return [Choice(key="base_model", value="dequantised", reason=reason)]


def without_quantization(architecture: PretrainedConfig) -> None:
    """Take out of transformers' configuration what says that its weights are quantised."""
    if hasattr(architecture, QUANTIZATION):
        delattr(architecture, QUANTIZATION)


def quantization_for(settings: QuantizationConfig) -> BitsAndBytesConfig:
    """Return what `from_pretrained` takes. settings: resolved."""
    import torch
    from transformers import BitsAndBytesConfig

    if settings.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=settings.llm_int8_threshold)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=getattr(torch, settings.bnb_4bit_compute_dtype),
        bnb_4bit_use_double_quant=settings.bnb_4bit_use_double_quant,
        bnb_4bit_quant_type=settings.bnb_4bit_quant_type,
    )


def settle_layers(model: PreTrainedModel, settings: QuantizationConfig, device: torch.device) -> None:
    """Make each quantised layer compute one function, in training and evaluation, forwards and backwards."""
    import torch
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            dtype = getattr(torch, settings.bnb_4bit_compute_dtype)
            layer.compute_dtype, layer.compute_type_is_set = dtype, True
            # The backward pass dequantises to this; stored weights can come with another.
            cast(Any, layer.weight).quant_state.dtype = dtype
            # On CPUs with AVX512-BF16 it would, in evaluation, repack the weight for good, with scales rounded to
            # bf16 and without a gradient: evaluating would change the training that follows, or break it. It also
            # fails where the number of outputs is not a multiple of 32.
            layer.support_avx512bf16_for_cpu = False
        elif isinstance(layer, Linear8bitLt):
            cast(Any, layer.state).threshold = settings.llm_int8_threshold
            if device.type == "cpu":
                _always_in_training_mode(layer)
                _initialise_once(layer)


@contextmanager
def cut_as_read(cut: Cut | None) -> Iterator[None]:
    """Have transformers keep a part of each quantised weight as soon as that is there: never are two of them whole.

    So are the scales of 4 bits, one for 64 elements; 8 bits have but one for each row. cut: returns a part of a tensor,
    in memory of its own; None: all stays whole.
    """
    if cut is None:
        yield
        return
    from transformers.integrations import bitsandbytes as theirs

    with ExitStack() as stack:
        # It would take a block as large as the whole model, and give it back, so that the allocator asks once.
        stack.enter_context(patch("transformers.modeling_utils.caching_allocator_warmup", lambda *_: None))
        for name in ("Bnb4bitQuantize", "Bnb4bitDeserialize", "Bnb8bitQuantize", "Bnb8bitDeserialize"):
            operation = getattr(theirs, name)
            stack.enter_context(patch.object(operation, "convert", _cutting(operation.convert, cut)))
        yield


def _cutting(convert: Callable[..., dict[str, Any]], cut: Cut) -> Callable[..., dict[str, Any]]:
    """Return transformers' conversion of a layer's tensors, with what is quantised cut."""
    from bitsandbytes.nn.modules import Int8Params, Params4bit

    def converted(*args: Any, **options: Any) -> dict[str, Any]:
        found = convert(*args, **options)
        for weight in found.values():
            if isinstance(weight, Params4bit):
                weight.data, weight.quant_state.absmax = cut(weight.data), cut(weight.quant_state.absmax)
            elif isinstance(weight, Int8Params):
                weight.data = weight.CB = cut(weight.data)
        return found

    return converted


def taken_parts(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Take the parts that `cut_as_read` left out of the quantised layers; return them by layer and parameter.

    Parameters of the whole shape, on meta, are in their place: `weight`, and `absmax` of 4 bits. From then on a layer
    computes with what parameters it is given.
    """
    import torch
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    found: dict[tuple[nn.Module, str], torch.Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, Linear4bit | Linear8bitLt):
            parts = _parts_of_4_bits(layer) if isinstance(layer, Linear4bit) else _part_of_8_bits(layer)
            for name, (part, shape) in parts.items():
                found[layer, name] = part
                whole = torch.empty(shape, dtype=part.dtype, device="meta")
                layer.register_parameter(name, torch.nn.Parameter(whole, requires_grad=False))
    return found


def _parts_of_4_bits(layer: Any) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Return a 4-bit layer's parts with the shape of the whole."""
    layer.quant_state = state = layer.weight.quant_state
    layer.register_forward_pre_hook(_use_given_scales)
    elements, packed = state.shape.numel(), layer.weight.data
    num_packed = -(-elements // (2 * packed.itemsize))
    return {"weight": (packed, (num_packed, 1)), "absmax": (state.absmax, (-(-elements // state.blocksize),))}


def _part_of_8_bits(layer: Any) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Return an 8-bit layer's part with the shape of the whole."""
    layer.init_8bit_state()
    layer.register_forward_pre_hook(_use_given_weight)
    return {"weight": (layer.weight.data, (layer.out_features, layer.in_features))}


def _use_given_scales(layer: nn.Module, inputs: object) -> None:
    """Have a 4-bit layer dequantise with the parameter that it has now. The weight, bitsandbytes looks up itself."""
    cast(Any, layer.quant_state).absmax = cast(Any, layer.absmax).data


def _use_given_weight(layer: nn.Module, inputs: object) -> None:
    """Have an 8-bit layer multiply with the parameter that it has now."""
    weight = cast(Any, layer.weight)
    weight.CB, cast(Any, layer.state).CB = None, weight.data  # None: nothing is to be initialised


def unquantised_experts(model: nn.Module) -> str | None:
    """Report the experts' weights, which no linear layer holds, so that they are not quantised; None without any."""
    experts = [weight for name, weight in model.named_parameters() if weight.ndim == 3 and "lora_" not in name]
    if not experts:
        return None
    elements = sum(weight.numel() for weight in experts)
    kind = str(experts[0].dtype).removeprefix("torch.")
    return f"quantization: the experts' weights, {elements:,} in all, are in no linear layer and stay in {kind}"


def _always_in_training_mode(layer: nn.Module) -> None:
    """Keep an 8-bit layer's kernel on a CPU the same, whatever the mode of the model around it.

    In training mode it multiplies dequantised weights; in evaluation mode it would quantise the activations, too, by
    columns of the whole batch: another function than the one that learned, in which a row's result depends on the
    rows beside it. The layer has nothing else that a mode could change.
    """

    def train(mode: bool = True) -> nn.Module:
        return layer

    layer.train()
    layer.train = train  # type: ignore[method-assign]


def _initialise_once(layer: Linear8bitLt) -> None:
    """Hand an 8-bit layer's weight and scales to its state now, and never again.

    PEFT's DoRA puts the weight into layers on a CPU again at each forward pass, without its scales: the layer would
    take it for a new one, and lose its scales.
    """
    cast(Any, layer).init_8bit_state()
    layer.init_8bit_state = lambda: None  # type: ignore[method-assign]


def _stored(folder: ModelFolder) -> QuantizationConfig:
    """Read the quantization of weights that are stored quantised in the folder."""
    stored = folder.config[QUANTIZATION]
    stored = stored if isinstance(stored, dict) else {}
    method = stored.get("quant_method")
    bits = 8 if stored.get("load_in_8bit") else 4 if stored.get("load_in_4bit") else None
    kind = stored.get("bnb_4bit_quant_type", "fp4")
    if method not in ("bitsandbytes", None) or bits is None or kind not in ("nf4", "fp4"):
        raise ModelError(
            what=f"the base model's weights are quantised by {method or 'a method that config.json does not name'}",
            where=folder.name,
            expected="weights of 16 or 32 bits, or those that bitsandbytes quantised to 4 or 8 bits",
            fix="take the model as it was before, and set `quantization: {bits: 4}` where memory is short",
        )
    if bits == 8:
        return QuantizationConfig(bits=8, llm_int8_threshold=float(stored.get("llm_int8_threshold", 6.0)))
    double = bool(stored.get("bnb_4bit_use_double_quant", False))
    return QuantizationConfig(bits=4, bnb_4bit_use_double_quant=double, bnb_4bit_quant_type=kind)
