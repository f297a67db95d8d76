"""Run rows of tokens through a model as one sequence, without padding, each row attending to itself alone.

transformers hands the attention of most architectures to a function of its registry. One of brim's own stands there
while packed rows pass: it takes the rows' places from the model's keywords, makes no mask, and reads no values. On CUDA
it is PyTorch's attention for sequences of several lengths, elsewhere one call of the usual attention for each row.

Which architectures do the same packed as padded is tried, not listed: see `packing_fit`.

Legend: R rows, N tokens of all rows, H query heads, K key and value heads, D head dimension.
"""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from brim.config import Choice
from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError
from brim.models.adapters import own_dropout
from brim.models.quantization import without_quantization
from brim.storage import Cache, cache_folder, digest, source_digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NAME = "brim_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Say where the rows of one sequence lie. What fills it up lies there as one more row, the last."""

    position_ids: Tensor  # [1, N] int64, from 0 in each row: the model is given them beside the tokens
    bounds: Tensor  # [R + 1] int32: where each row begins, and the end
    lengths: tuple[int, ...]  # tokens of each row
    num_rows: int  # without what fills the sequence up


class Unpackable(Exception):
    """Tell that an architecture's attention asks for what packed rows cannot be given."""


class PackedAttention:
    """Switch a model between its own attention and that of packed rows."""

    def __init__(self, model: nn.Module, *, is_cuda: bool = False) -> None:
        """Look for the model's configurations. is_cuda: it runs on a GPU, or is traced as on one."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if _NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            ALL_ATTENTION_FUNCTIONS.register(_NAME, packed_attention)
        configs = (getattr(module, "config", None) for module in model.modules())
        self._is_cuda = is_cuda
        self._configs = list({id(each): each for each in configs if hasattr(each, _KEY)}.values())

    @contextmanager
    def of(self, rows: PackedRows) -> Iterator[None]:
        """Let these rows pass, forward and backward: recomputed activations want the same attention."""
        before = [getattr(config, _KEY) for config in self._configs]
        for config in self._configs:
            setattr(config, _KEY, _NAME)
            setattr(config, _ROWS, (rows, self._is_cuda))
        try:
            yield
        finally:
            for config, value in zip(self._configs, before, strict=True):
                setattr(config, _KEY, value)
                delattr(config, _ROWS)


def passing(attention: PackedAttention | None, rows: PackedRows | None) -> AbstractContextManager[None]:
    """Return the context in which rows pass forward and backward; nothing is to be done for padded ones (None)."""
    return nullcontext() if attention is None or rows is None else attention.of(rows)


_KEY = "_attn_implementation_internal"  # the public property would go through all sub-configurations, at each pass
_ROWS = "_brim_packed_rows"  # the configuration reaches every attention, keywords do not; nor does a thread's context


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each row: query [1, H, N, D], key and value [1, K, N, D]. Return [1, N, H, D] and no weights.

    Raises Unpackable for what changes the scores in a way that is not known here.
    """
    asked = sorted(name for name in ("softcap", "s_aux", "position_bias", "cache") if others.get(name) is not None)
    if asked or attention_mask is not None or query.shape[2] != key.shape[2]:
        raise Unpackable(f"its attention asks for {' and '.join(asked)}" if asked else "it makes masks of its own")
    rows, is_cuda = getattr(module.config, _ROWS)
    if is_cuda and _fits_kernel(query, value, dropout=dropout):
        return _by_kernel(query, key, value, rows, scaling, sliding_window), None
    options = {"dropout": dropout, "scaling": scaling}
    return _row_by_row(module, query, key, value, rows, sliding_window, **options), None


def _row_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    sliding_window: int | None,
    **options: Any,
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    split = (torch.split(each, list(rows.lengths), dim=2) for each in (query, key, value))
    attended = []
    for length, *tensors in zip(rows.lengths, *split, strict=True):
        is_within = sliding_window is None or length <= sliding_window
        mask = None if is_within else _window(length, sliding_window or 0, query.device)
        attended.append(sdpa_attention_forward(module, *tensors, mask, is_causal=True, **options)[0])
    return torch.cat(attended, dim=1)


def _window(length: int, width: int, device: torch.device) -> Tensor:
    """Return which keys each query sees, [1, 1, T, T]: itself and the width - 1 before it."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return ((distance >= 0) & (distance < width))[None, None]


_WIDEST_HEAD = 256


def _fits_kernel(query: Tensor, value: Tensor, *, dropout: float) -> bool:
    """Return whether PyTorch's attention for rows of several lengths takes these tensors: 16 bits, without dropout."""
    width = query.shape[-1]
    return _dtype(query) in _HALF and not dropout and width == value.shape[-1] <= _WIDEST_HEAD


def _dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which autocast, which does not know the kernel, would run it."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return query.dtype


_HALF = (torch.float16, torch.bfloat16)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    from torch.nn.attention import varlen

    dtype = _dtype(query)
    q, k, v = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))  # [N, heads, D]
    longest = max(rows.lengths)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # a tuple: it is compared with one
    options: dict[str, Any] = {
        "window_size": window,
        "scale": scaling,
        "enable_gqa": q.shape[1] != k.shape[1],
        "is_causal": True,
    }
    taken = _keywords_of(varlen.varlen_attn)
    options = {name: value for name, value in options.items() if name in taken}
    out: Any = varlen.varlen_attn(q, k, v, rows.bounds, rows.bounds, longest, longest, **options)
    return cast(Tensor, out[None])


@cache
def _keywords_of(function: Any) -> frozenset[str]:
    """Return what it takes: torch 2.10 knows is_causal, 2.11 window_size in its place, 2.12 enable_gqa besides."""
    return frozenset(inspect.signature(function).parameters)


# Which layout a run takes

_SETTING = "trainer.packing"


def packing_choice(
    config: Config, read: Callable[[], PretrainedConfig], *, capability: tuple[int, int] | None
) -> Choice | None:
    """Say whether rows are packed; None where nothing is open.

    read: returns the architecture, where it is asked for. capability: of the GPU; None: not on a GPU.
    Raises ConfigError where packing is asked for and cannot be had.
    """
    trainer = config.trainer
    if trainer.packing is False:
        return None
    if trainer.packing == "auto" and capability is None:
        return Choice(key=_SETTING, value=False, reason="on a CPU rows of like length, padded, are about as fast")
    architecture = read()
    against, reason = _against(config, architecture, capability), ""
    if against is None:
        fit = _fit_of(architecture, trust_remote_code=config.trust_remote_code)
        against, reason = None if fit.is_fit else f"its architecture cannot: {fit.reason}", fit.reason
    if trainer.packing is True:
        if against:
            raise ConfigError(what=f"{_SETTING} is true, and {against}", where=_SETTING, fix=f"set {_SETTING}: auto")
        return None
    return Choice(key=_SETTING, value=against is None, reason=against or reason)


_AMPERE = (8, 0)


def _against(config: Config, architecture: PretrainedConfig, capability: tuple[int, int] | None) -> str | None:
    """Return what else in a configuration speaks against packed rows."""
    attention, trainer = config.model_parameters.attn_implementation, config.trainer
    if attention not in ("auto", "sdpa"):
        return f"attn_implementation is {attention}"
    rate = 0.0 if config.adapter is None else config.adapter.dropout
    if rate and isinstance(trainer, FinetuneTrainer) and trainer.dropout_by_row:
        return "trainer.dropout_by_row draws for padded rows"
    if capability is None:
        return None
    if capability < _AMPERE:
        return "PyTorch's attention for rows of several lengths takes a GPU of compute capability 8.0 or more"
    if config.precision == "fp32":
        return "in 32 bits PyTorch has no attention for rows of several lengths on a GPU"
    own = [name for name in own_dropout(architecture.to_dict()) if name.startswith("att")]
    if own:
        return f"the base model's {own[0]} is not 0"
    text = architecture.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    queries = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    if max(queries, getattr(text, "v_head_dim", 0)) > _WIDEST_HEAD or hasattr(text, "kv_lora_rank"):
        return "its heads have widths that PyTorch's attention for rows of several lengths does not take"
    return None


def _fit_of(architecture: PretrainedConfig, *, trust_remote_code: bool) -> PackingFit:
    """Return the fit that was found before, or try."""
    cache = Cache(cache_folder(), "packing")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    name = digest({"architecture": architecture.to_dict(), "versions": versions, "code": source_digest(("models",))})

    def parse(saved: Any) -> PackingFit:
        return PackingFit(is_fit=bool(saved["is_fit"]), reason=str(saved["reason"]))

    fit: PackingFit | None = cache.read(name, parse)
    if fit is None:
        fit = packing_fit(architecture, trust_remote_code=trust_remote_code)
        cache.write(name, asdict(fit))
    return fit


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingFit:
    """Say whether an architecture gives packed rows the scores that it gives padded ones."""

    is_fit: bool
    reason: str


_LENGTHS = (29, 13, 1, 22)  # of the rows of a trial
_WINDOW, _POSITIONS, _VOCABULARY, _WIDTH, _DEEPEST = 8, 32, 128, 96, 8
_TOLERANCE = 1e-4  # in fp32, where rounding makes some 1e-6 and a wrong key more than 1e-2


def packing_fit(architecture: PretrainedConfig, *, trust_remote_code: bool = False) -> PackingFit:
    """Try a small random model of this configuration, whose window and positions are shorter than the rows together.

    Packed rows must have the scores of padded ones, and other tokens in one row must leave those of the others alone.
    """
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = _small(architecture, trust_remote_code=trust_remote_code)
            return _tried(model)
    except Unpackable as error:
        return PackingFit(is_fit=False, reason=str(error))
    except Exception as error:  # whatever an architecture raises over keywords that it does not take
        return PackingFit(is_fit=False, reason=f"{type(error).__name__} over packed rows")


@torch.no_grad()
def _tried(model: nn.Module) -> PackingFit:
    tokens = [torch.randint(_VOCABULARY, (length,)) for length in _LENGTHS]
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    rows = packed_rows(_LENGTHS)
    expected = model(input_ids=padded, use_cache=False).logits
    expected = torch.cat([each[:length] for each, length in zip(expected, _LENGTHS, strict=True)])
    attention = PackedAttention(model)

    def scores(rows_of_tokens: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(rows_of_tokens))[None]
        with attention.of(rows):
            logits: Tensor = model(input_ids=joined, position_ids=rows.position_ids, use_cache=False).logits
        return logits[0]

    found = scores(tokens)
    other = scores([(tokens[0] + 1) % _VOCABULARY, *tokens[1:]])
    size = float(expected.abs().max())
    apart = float((found - expected).abs().max()) / size
    leaked = float((other - found)[_LENGTHS[0] :].abs().max()) / size
    changed = float((other - found)[: _LENGTHS[0]].abs().max()) / size
    if not (math.isfinite(apart) and changed > _TOLERANCE):
        return PackingFit(is_fit=False, reason="a random model of it tells nothing")
    if apart > _TOLERANCE:
        return PackingFit(is_fit=False, reason=f"packed rows get other scores than padded ones, by {apart:.1g}")
    if leaked:
        return PackingFit(is_fit=False, reason=f"a row's scores depend on the row before it, by {leaked:.1g}")
    return PackingFit(is_fit=True, reason=f"packed rows get the scores of padded ones, to {max(apart, 1e-9):.0e}")


def packed_rows(lengths: Sequence[int], *, filling: int = 0) -> PackedRows:
    """Return the places of rows of these lengths, as tensors of the CPU. filling: tokens behind them, of no row."""
    each = [*lengths, filling] if filling else list(lengths)
    bounds = np.cumsum([0, *each])
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], each)
    return PackedRows(
        position_ids=torch.from_numpy(positions[None]),
        bounds=torch.from_numpy(bounds.astype(np.int32)),
        lengths=tuple(each),
        num_rows=len(lengths),
    )


def _small(architecture: PretrainedConfig, *, trust_remote_code: bool) -> nn.Module:
    """Build a random model of the configuration, narrower where the architecture allows it, in fp32."""
    from transformers import AutoModelForCausalLM

    error: Exception | None = None
    for is_narrow in (True, False):
        config = _shrunk(architecture, is_narrow=is_narrow)
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=trust_remote_code
            ).eval()
        except ValueError as raised:
            if "scaled_dot_product_attention" in str(raised):
                raise Unpackable("its attention is not exchangeable") from None
            error = raised
        except Exception as raised:  # widths that do not go together
            error = raised
        else:
            return _redrawn(model)
    raise Unpackable(f"no small model of it could be built: {error}")


def _redrawn(model: nn.Module) -> nn.Module:
    """Draw weights anew, so large that each score depends on every token that it may depend on."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=2 / math.sqrt(parameter.shape[-1]))
    return model


def _shrunk(architecture: PretrainedConfig, *, is_narrow: bool) -> PretrainedConfig:
    config = copy.deepcopy(architecture)
    without_quantization(config)
    text = config.get_text_config()
    _cut_layers(text)
    heads, groups = getattr(text, "num_attention_heads", 0), getattr(text, "num_key_value_heads", 0)
    small: dict[str, int] = {"vocab_size": _VOCABULARY}
    if is_narrow and heads and text.hidden_size % heads == 0:
        kept = 2 * max(1, min(heads // groups, 4)) if groups and heads % groups == 0 else 4
        small["num_attention_heads"] = kept
        if groups:
            small["num_key_value_heads"] = 2 if groups < heads else kept
        small["hidden_size"] = kept * (text.hidden_size // heads)
        small |= dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), _WIDTH)
    for name in ("sliding_window", "attention_window", "window_size", "attention_chunk_size"):
        if isinstance(getattr(text, name, None), int):
            small[name] = _WINDOW
    small |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), _POSITIONS)
    for name, value in small.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, value)
    for each in (config, text):
        each.bos_token_id = each.eos_token_id = None
        each.pad_token_id = 0
    return config


def _cut_layers(text: PretrainedConfig) -> None:
    """Keep the first layers, until each kind of layer is among them."""
    num_layers = text.num_hidden_layers
    kinds = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == num_layers}
    first = [max(value.index(kind) for kind in value) for value in kinds.values()]
    kept = min(max(2, 1 + max(first, default=0)), num_layers, _DEEPEST)
    text.num_hidden_layers = kept
    for name, value in kinds.items():
        setattr(text, name, value[:kept])
