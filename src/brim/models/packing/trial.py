"""Say whether rows are packed: what a configuration asks for, what the device has, and what its architecture bears.

Which architectures do the same packed as padded is tried, not listed: see `packing_fit`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from brim.config import Choice
from brim.config.schema import Config
from brim.models.packing.attention import WIDEST_HEAD, PackedAttention, Unpackable, has_kernel, packed_rows
from brim.storage import Cache, cache_folder, digest, source_digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SETTING = "trainer.packing"
_AMPERE = (8, 0)


def packing_choice(
    config: Config, read: Callable[[], PretrainedConfig], *, capability: tuple[int, int] | None
) -> Choice | None:
    """Say whether rows are packed; None where nothing is open.

    read: returns the architecture, where it is asked for. capability: of the GPU; None: not on a GPU. Where packing is
    asked for and cannot be had, rows are padded: what is learned is the same.
    """
    asked = config.trainer.packing
    if asked is False:
        return None
    if asked == "auto" and capability is None:
        return Choice(key=_SETTING, value=False, reason=_ON_A_CPU)
    against, reason = _against(config, capability), ""
    if against is None:
        fit = _fit_of(read(), trust_remote_code=config.trust_remote_code)
        against = f"its architecture cannot: {fit.reason}" if not fit.is_fit else fit.against_kernel(capability)
        reason = fit.reason
    if against is None:
        return None if asked is True else Choice(key=_SETTING, value=True, reason=reason)
    return Choice(key=_SETTING, value=False, reason=against, overrules=asked is True)


# docs/decisions/0025-packed-micro-batches.md
_ON_A_CPU = "on a CPU rows are packed where a training's plan estimates that it is faster; true packs them"


def _against(config: Config, capability: tuple[int, int] | None) -> str | None:
    """Return what, beside the architecture, speaks against packed rows."""
    attention = config.model_parameters.attn_implementation
    if attention not in ("auto", "sdpa"):
        return f"attn_implementation is {attention}"
    if capability is None:
        return None
    if capability < _AMPERE:
        return "PyTorch's attention for rows of several lengths takes a GPU of compute capability 8.0 or more"
    if config.precision == "fp32":
        return "in 32 bits PyTorch has no attention for rows of several lengths on a GPU"
    if not has_kernel():
        return "this version of PyTorch has no attention for rows of several lengths with windows: 2.11 has"
    return None


def _fit_of(architecture: PretrainedConfig, *, trust_remote_code: bool) -> PackingFit:
    """Return the fit that was found before, or try. What code of a model's own does is not kept."""
    cache = Cache(cache_folder(), "packing")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    name = digest({"architecture": architecture.to_dict(), "versions": versions, "code": source_digest(("models",))})

    def parse(saved: Any) -> PackingFit:
        reason, widths = str(saved["reason"]), tuple((int(q), int(v)) for q, v in saved["widths"])
        return PackingFit(is_fit=saved["is_fit"] is True, reason=reason, widths=widths, drops=bool(saved["drops"]))

    fit: PackingFit | None = None if trust_remote_code else cache.read(name, parse)
    if fit is None:
        fit = packing_fit(architecture, trust_remote_code=trust_remote_code)
        if not trust_remote_code:
            cache.write(name, asdict(fit))
    return fit


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingFit:
    """Say whether an architecture gives packed rows the scores that it gives each row alone."""

    is_fit: bool
    reason: str
    widths: tuple[tuple[int, int], ...] = ()  # of a head's queries and values, of each kind of layer
    drops: bool = False  # its attention drops something in training

    def against_kernel(self, capability: tuple[int, int] | None) -> str | None:
        """Return why PyTorch's attention for rows of several lengths cannot do what this architecture asks for."""
        if capability is None:
            return None
        if self.drops:
            return "the base model's attention has dropout"
        if any(queries != values or queries > WIDEST_HEAD for queries, values in self.widths):
            return "its heads have widths that PyTorch's attention for rows of several lengths does not take"
        return None


_LENGTHS = (29, 13, 1, 22)  # of the rows of a trial
_WINDOW, _POSITIONS, _ORIGINAL, _VOCABULARY, _WIDTH, _DEEPEST = 8, 32, 16, 128, 96, 8
_MOST_PARAMETERS = 1 << 28  # 1 GiB, drawn in seconds
# In fp32: rounding makes some 1e-6, with experts also of sums that others' tokens are in; a wrong key more than 1e-2.
_TOLERANCE, _ROUNDING = 1e-4, 1e-5


def packing_fit(architecture: PretrainedConfig, *, trust_remote_code: bool = False) -> PackingFit:
    """Try a small random model of this configuration, whose window and positions are shorter than the rows together.

    Packed rows must have the scores of each row alone, which rotations that follow the longest row fail, too, and other
    tokens in one row must leave those of the others alone.
    """
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            fit = _tried(small_model(architecture, trust_remote_code=trust_remote_code))
        drops = any(vars(architecture.get_text_config()).get(name) for name in _DROPOUTS)
        return replace(fit, drops=drops)
    except Unpackable as error:
        return PackingFit(is_fit=False, reason=str(error))
    except Exception as error:  # whatever an architecture raises over positions that it does not take
        return PackingFit(is_fit=False, reason=f"{type(error).__name__} over packed rows")


def _tried(model: nn.Module) -> PackingFit:
    tokens = [torch.randint(_VOCABULARY, (length,)) for length in _LENGTHS]
    rows, attention = packed_rows(_LENGTHS), PackedAttention(model)

    @torch.no_grad()
    def scores(rows_of_tokens: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(rows_of_tokens))[None]
        with attention.of(rows):
            logits: Tensor = model(input_ids=joined, position_ids=rows.position_ids, use_cache=False).logits
        return logits[0]

    with torch.no_grad():
        expected = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in tokens])
    found = scores(tokens)
    other = scores([(tokens[0] + 1) % _VOCABULARY, *tokens[1:]])
    size = float(expected.abs().max())
    apart = float((found - expected).abs().max()) / size
    leaked = float((other - found)[_LENGTHS[0] :].abs().max()) / size
    changed = float((other - found)[: _LENGTHS[0]].abs().max()) / size
    if not (math.isfinite(apart) and changed > _TOLERANCE):
        return PackingFit(is_fit=False, reason="a random model of it tells nothing")
    if apart > _TOLERANCE:
        return PackingFit(is_fit=False, reason=f"packed rows get other scores than rows alone, by {apart:.1g}")
    if leaked > _ROUNDING:
        return PackingFit(is_fit=False, reason=f"a row's scores depend on the row before it, by {leaked:.1g}")
    reason = f"packed rows get the scores of rows alone, to {max(apart, 1e-9):.0e}"
    return PackingFit(is_fit=True, reason=reason, widths=tuple(sorted(attention.widths)))


def small_model(
    architecture: PretrainedConfig, *, trust_remote_code: bool, attention: str | None = "sdpa"
) -> nn.Module:
    """Build a random model of the configuration, narrower where the architecture allows it, in fp32.

    attention: by transformers' name; None: what the architecture has. Raises Unpackable, or what transformers raises.
    """
    from transformers import AutoModelForCausalLM

    error: Exception | None = None
    for is_narrow in (True, False):
        try:
            config = _shrunk(architecture, is_narrow=is_narrow)
            build = partial(
                AutoModelForCausalLM.from_config,
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
            with torch.device("meta"):
                num_parameters = sum(each.numel() for each in build().parameters())
            if num_parameters > _MOST_PARAMETERS:
                raise Unpackable(f"no small model of it could be built: {num_parameters:,} parameters")
            return _redrawn(build().eval())
        except Unpackable as raised:
            error = raised
        except Exception as raised:  # widths that do not go together
            if "scaled_dot_product_attention" in str(raised):
                raise Unpackable("its attention is not exchangeable") from None
            error = Unpackable(f"no small model of it could be built: {type(raised).__name__}")
    assert error is not None, "neither could be built"
    raise error


def _redrawn(model: nn.Module) -> nn.Module:
    """Draw weights anew, so large that each score depends on every token that it may depend on."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=2 / math.sqrt(parameter.shape[-1]))
    return model


_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_dropout_prob", "attn_dropout")  # of attention's weights
_WINDOWS = ("sliding_window", "attention_window", "attention_window_size", "window_size", "attention_chunk_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")


def _shrunk(architecture: PretrainedConfig, *, is_narrow: bool) -> PretrainedConfig:
    config = copy.deepcopy(architecture)
    vars(config).pop("quantization_config", None)
    text = config.get_text_config()
    _cut_layers(text)
    rotates = bool(
        _number_of(text, "rope_theta") or vars(text).get("rope_parameters") or vars(text).get("rope_scaling")
    )
    small = dict.fromkeys(_WINDOWS, _WINDOW) | dict.fromkeys(_LIMITS, _ORIGINAL if rotates else _POSITIONS)
    small |= {"vocab_size": _VOCABULARY, "original_max_position_embeddings": _ORIGINAL}
    if is_narrow:
        small |= _narrow(text)
    for name, value in small.items():
        if _number_of(text, name):
            setattr(text, name, value)
    _shorten_rotation(vars(text))
    for each in (config, text):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(each, name, 0)
    return config


def _narrow(text: PretrainedConfig) -> dict[str, int]:
    """Return fewer heads, experts and features; heads keep their width, and how many of them share keys."""
    small = dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), _WIDTH)
    heads, groups = _number_of(text, "num_attention_heads"), _number_of(text, "num_key_value_heads")
    width = _number_of(text, "head_dim") or (
        text.hidden_size // heads if heads and text.hidden_size % heads == 0 else 0
    )
    if heads and width:
        kept = 2 * max(1, min(heads // groups, 4)) if groups and heads % groups == 0 else 4
        small |= {"num_attention_heads": kept, "hidden_size": kept * width}
        if groups:
            small["num_key_value_heads"] = 2 if groups < heads else kept
    chosen = _number_of(text, "num_experts_per_tok") or 1
    spread = _number_of(text, "n_group") or 1
    return small | dict.fromkeys(_EXPERTS, spread * max(2, 2 * chosen))


def _number_of(text: PretrainedConfig, name: str) -> int:
    """Return a number of the configuration's own; 0 where it has none. (Some raise over keys that layers have.)"""
    value = vars(text).get(name)
    return value if type(value) is int else 0


def _shorten_rotation(settings: dict[str, Any]) -> None:
    """Let rotations that change beyond a number of positions do so within the rows of the trial."""
    for name in ("rope_parameters", "rope_scaling"):
        given = settings.get(name)
        for each in (given, *given.values()) if isinstance(given, dict) else ():
            if isinstance(each, dict) and "original_max_position_embeddings" in each:
                each["original_max_position_embeddings"] = _ORIGINAL


def _cut_layers(text: PretrainedConfig) -> None:
    """Keep one layer of each kind, by what the configuration says of each layer."""
    num_layers = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == num_layers}
    first: dict[str, int] = {}
    for number in range(num_layers):
        first.setdefault(repr([value[number] for value in lists.values()]), number)
    kept = sorted({*list(first.values())[:_DEEPEST], *range(min(2, num_layers))})
    text.num_hidden_layers = len(kept)
    for name, value in lists.items():
        setattr(text, name, [value[number] for number in kept])
