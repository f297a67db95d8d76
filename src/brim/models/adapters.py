"""Put LoRA adapters on a base model, through PEFT.

It also says which attention kernel `model_parameters.attn_implementation: auto` has become.
"""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from brim.config import Choice
from brim.config.schema import LoraConfig
from brim.errors import ModelError
from brim.models.adapter_function import use_adapter_function
from brim.models.folders import WEIGHTS, AdapterFolder, differs, open_adapter, require_same, unusable
from brim.models.needs import experts_with_dropout
from brim.models.quantization import require_bitsandbytes

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


# PEFT warns so of experts, whose ranks it sets all the same: it looks for modules of that name, and finds parameters.
_EXPERTS_RANK = r"The following (rank|alpha)_pattern keys did not match"


def add_adapter(model: PreTrainedModel, settings: LoraConfig, *, seed: int, trainable: bool) -> PeftModel:
    """Put an adapter on the base model, new or pretrained; adapter weights are fp32, the base keeps its dtype.

    A new adapter's weights are drawn from the seed. Raises ModelError when the target modules are unknown, or the
    pretrained adapter does not fit, or has other settings than those that were given.
    """
    if find_spec("bitsandbytes") is not None:
        require_bitsandbytes()  # PEFT imports it for any adapter
    torch.manual_seed(seed)
    weights = settings.pretrained_adapter_weights
    adapted = _new(model, settings) if weights is None else _pretrained(model, settings, weights, trainable=trainable)
    use_adapter_function(adapted)
    return adapted


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has an adapter."""
    import peft

    return isinstance(model, peft.PeftModel)


def _new(model: PreTrainedModel, settings: LoraConfig) -> PeftModel:
    import peft

    targets = settings.target_modules
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.alpha if settings.alpha is not None else 2 * settings.r,
        lora_dropout=settings.dropout,
        bias=settings.bias_type,
        target_modules=targets if isinstance(targets, str | None) else list(targets),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        init_lora_weights=True if settings.init_lora_weights in (True, "default") else settings.init_lora_weights,
    )
    try:
        if isinstance(targets, str):
            re.compile(targets)
        with warnings.catch_warnings():
            # GPT-2's layers are transposed; PEFT notices that and does what is right.
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out", category=UserWarning)
            warnings.filterwarnings("ignore", message=_EXPERTS_RANK, category=RuntimeWarning)
            adapted = peft.get_peft_model(model, lora)
    except (ValueError, re.error) as error:
        if "lora_dropout" in str(error):
            raise ModelError(experts_with_dropout(settings.dropout)) from error
        last_names = [name.rsplit(".", 1)[-1] for name, each in model.named_modules() if _is_linear(each)]
        raise ModelError(
            what=f"adapter.target_modules: {str(error).splitlines()[0]}",
            expected=f"names of linear layers of this model: {', '.join(dict.fromkeys(last_names))}",
            fix="set adapter.target_modules to some of them, or to all-linear",
        ) from error
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    _biases_in_fp32(adapted, [name for name in trained if _is_bias(name)])
    return adapted


def _pretrained(model: PreTrainedModel, settings: LoraConfig, weights: str, *, trainable: bool) -> PeftModel:
    import peft

    folder = open_adapter(weights)
    require_same(settings, folder)
    wanted = _wanted_targets(model, settings, folder)
    try:
        with warnings.catch_warnings():
            # PEFT would leave the missing ones as they were drawn, and go on.
            warnings.filterwarnings("error", message=".*missing adapter keys", category=UserWarning)
            warnings.filterwarnings("ignore", message=_EXPERTS_RANK, category=RuntimeWarning)
            adapted = peft.PeftModel.from_pretrained(model, str(folder.path), is_trainable=trainable)
    except (ValueError, OSError, RuntimeError, KeyError, TypeError, SafetensorError, UserWarning) as error:
        raise ModelError(unusable(weights, " ".join(str(error).split()))) from error
    # The base that the adapter names may be anybody's model, which PEFT would look up when it saves.
    for own in adapted.peft_config.values():
        own.base_model_name_or_path = model.name_or_path
    if wanted is not None:
        _require_targets(adapted, wanted, settings, folder)
    with safe_open(folder.path / WEIGHTS, framework="pt") as tensors:
        names = set(tensors.keys())
        _require_all_taken(adapted, names, weights)
        brought = [name for name, _ in adapted.named_parameters() if name in names and _is_bias(name)]
        for name, bias in _biases_in_fp32(adapted, brought):
            bias.data.copy_(tensors.get_tensor(name))  # once more, since 16 bits have rounded it
    return adapted


def _wanted_targets(model: PreTrainedModel, settings: LoraConfig, folder: AdapterFolder) -> set[str] | None:
    """Return the layers that the user's target modules stand for; None where they are open or the folder's own."""
    targets = settings.target_modules
    if "target_modules" not in settings.model_fields_set or targets in (None, folder.settings.target_modules):
        return None
    if targets == "all-linear":
        head = model.get_output_embeddings()
        return {name for name, each in model.named_modules() if _is_linear(each) and each is not head}
    names = [name for name, _ in model.named_modules()]
    if isinstance(targets, str):
        return {name for name in names if re.fullmatch(targets, name)}
    assert targets is not None, "null leaves it open"
    return {name for name in names if name in targets or name.endswith(tuple(f".{target}" for target in targets))}


def _require_targets(adapted: PeftModel, wanted: set[str], settings: LoraConfig, folder: AdapterFolder) -> None:
    from peft.tuners.lora import LoraLayer, ParamWrapper

    base = adapted.get_base_model()
    # Where a target is all linear layers, PEFT adapts the experts' weights with them, which no linear layer holds.
    layers = (each for each in base.named_modules() if not isinstance(each[1], ParamWrapper))
    if {name for name, each in layers if isinstance(each, LoraLayer)} != wanted:
        key = "target_modules"
        raise ModelError(differs(key, settings.target_modules, folder.settings.target_modules, folder.name))


def _require_all_taken(adapted: PeftModel, names: set[str], weights: str) -> None:
    """Refuse weights that PEFT skipped in silence, since no layer of the model has that name."""
    import peft

    taken = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    unused = sorted(name for name in names if ("lora_" in name or _is_bias(name)) and name not in taken)
    if unused:
        raise ModelError(unusable(weights, f"no layer takes {', '.join(unused)}"))


def _is_bias(name: str) -> bool:
    """Return whether a weight of an adapter is a bias of the base model, which the adapter brings trained."""
    return name.endswith(".bias") and "lora_" not in name


def _biases_in_fp32(adapted: PeftModel, names: list[str]) -> list[tuple[str, nn.Parameter]]:
    """Make these biases fp32, as all that trains: 16 bits would round small updates away.

    A norm goes with its bias, since it takes weights of one dtype only; a linear layer's weight stays as it is, and
    autocast brings the two together.
    """
    for name in names:
        owner = adapted.get_submodule(name.rpartition(".")[0])
        if _is_linear(owner):
            owner.bias.data = owner.bias.data.float()
        else:
            owner.float()
    return [(name, cast(nn.Parameter, adapted.get_parameter(name))) for name in names]


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D  # what GPT-2 is made of

    return isinstance(module, nn.Linear | Conv1D)


_KEY = "model_parameters.attn_implementation"


def attention_choice(setting: str, model: PreTrainedModel) -> tuple[Choice, ...]:
    """Say which kernel a model was built with; nothing where the user chose it."""
    if setting != "auto":
        return ()
    chosen: str = model.config._attn_implementation
    reason = f"{type(model).__name__} has {'it' if chosen == 'sdpa' else 'no sdpa'}"
    return (Choice(key=_KEY, value=chosen, reason=reason),)
