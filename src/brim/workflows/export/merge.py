"""Merge an adapter into its base model, and write it if it agrees with the unmerged model.

Merging puts plain 16-bit weights in place of quantised ones and low-rank updates. The two models are compared on the
tokens of a probe: validation rows of the run, its training rows where it has none, else a fixed text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from brim.data import prepare
from brim.data.read import Data, read
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import DataError, ExportError, InputError, ModelError, Problem
from brim.infer.metrics import Divergence, Runner
from brim.models import LLM, load_base, load_llm, no_library_bars, no_library_warnings, precision
from brim.models.folders import locate
from brim.notes import Say
from brim.session import Session
from brim.train import RunFolder
from brim.workflows.export.export import (
    ADAPTER,
    CARD,
    card_of,
    check_target,
    completed,
    files_of,
    filling,
    kind_of,
    place,
    size_of,
    without_paths,
)
from brim.workflows.runs import ExportResult

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel


# The default limit, in nats a token (docs/export.md has the reasons).
MOST = 0.01  # 1% of perplexity


LEAST = 0.001  # arithmetic in 16 bits costs as much in any case


SHARE = 0.1  # of what the adapter does


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


_SHARD = "5GB"


_FEW_ROWS = 2  # at once: all of their logits are in memory beside those of the other model


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """Say how an adapter is merged."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    max_divergence: float | None = None  # mean KL divergence, nats a token; None: see limit_of
    dataset: Data | None = None  # whose rows the two models are compared on; default: the run's validation rows


def merging_of(merge: bool, **given: Any) -> Merging:
    """Check arguments of Merging as a person typed them; None stands for the default. Raises InputError."""
    typed = {name: value for name, value in given.items() if value is not None}
    dtype, most = typed.get("dtype", "bf16"), typed.get("max_divergence", 0.0)
    if typed and not merge:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
        what = f"{options} applies to merged weights, and nothing is merged"
        raise InputError(what=what, fix="add --merge, or leave it out")
    if dtype not in DTYPES:
        raise InputError(what=f"there is no dtype {dtype!r}", expected=", ".join(DTYPES), fix="choose one with --dtype")
    if not most >= 0:
        what = f"--max-divergence is {most:g}"
        raise InputError(what=what, expected="nats a token: 0 or more", fix="leave it out for the default")
    return Merging(**typed)


def limit_of(adapter_kl: float | None) -> float:
    """Return how far merging may move predictions: a tenth of what the adapter does, from 0.001 to 0.01 nats a token.

    adapter_kl: how far the base without the adapter is from the model; where that is unknown, 0.01.
    """
    return MOST if adapter_kl is None else min(MOST, max(LEAST, SHARE * adapter_kl))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Hold how the merged model compares with the unmerged one."""

    merged: Divergence  # from the unmerged model
    adapter_kl: float | None  # how far the base without the adapter is from it; None where it cannot be had
    source: str  # of the tokens
    limit: float


@no_library_warnings()
def merge_run(run: RunFolder, session: Session, path: Path, merging: Merging, *, say: Say) -> ExportResult:
    """Write a plain transformers model into a new or an empty folder.

    Two models are never in memory together: the unmerged one's logits are kept (half a GiB at most), it turns into the
    merged one layer by layer, which is written, freed, read back as any user would read it, and compared.
    Raises ExportError, leaving nothing behind, when the two differ by more than the limit.
    """
    check_target(path, run)
    _require_adapter(session, run)
    asked = probe(session, merging.dataset, say)
    rows = session.config.trainer.eval_batch_size
    how = Runner(
        pad_id=session.encoder.pad_id,
        batch_rows=rows if isinstance(rows, int) else _FEW_ROWS,
        device=session.device,
    )
    llm = load_llm(session.config, session.folder, session.device, trainable=False, keeps_digits=True)
    before = list(how.logits(llm.model, asked.rows, llm.precision))
    adapter_kl = _effect(llm, before, asked, how)
    merged = merge_adapter(cast(Any, llm.model), dtype=DTYPES[merging.dtype])
    del llm
    num_bytes = sum(weight.numel() * weight.element_size() for weight in merged.parameters())
    with filling(path, num_bytes=num_bytes) as folder, no_library_bars():
        merged.save_pretrained(str(folder), max_shard_size=_SHARD)
        del merged
        learned = files_of(run.model)
        place(folder, {name: file for name, file in learned.items() if name not in ADAPTER})
        found = Divergence.between(before, how.logits(_read_back(folder, session), asked.rows, precision("fp32")))
        limit = merging.max_divergence if merging.max_divergence is not None else limit_of(adapter_kl)
        compared = Compared(merged=found, adapter_kl=adapter_kl, source=asked.source, limit=limit)
        _require_close(compared, merging, path)
        _complete(folder, run, session, merging, compared)
    for line in _notes(compared, merging):
        say(line)
    return ExportResult(path=path, kind="merged", num_bytes=size_of(path), divergence=found, probe=asked.source)


def _read_back(folder: Path, session: Session) -> PreTrainedModel:
    """Load the model as plain transformers opens it: in the dtype of its files, with arithmetic in that dtype."""
    return load_base(
        locate(str(folder)),
        initialize="pretrained",
        dtype=None,
        attn_implementation=session.config.model_parameters.attn_implementation,
        trust_remote_code=session.config.trust_remote_code,
        seed=session.config.random_seed,
        device=session.device,
    )


def _effect(llm: LLM, before: list[torch.Tensor], asked: Probe, how: Runner) -> float | None:
    """Return how far the base alone is from the adapted model; None with trained biases, which PEFT cannot take off."""
    model: Any = llm.model
    if any(settings.bias != "none" for settings in model.peft_config.values()):
        return None
    with model.disable_adapter():
        return Divergence.between(before, how.logits(model, asked.rows, llm.precision)).mean_kl


def _complete(folder: Path, run: RunFolder, session: Session, merging: Merging, compared: Compared) -> None:
    """Write the files beside the weights, with the figures."""
    facts = {
        "kind": "merged",
        "dtype": merging.dtype,
        "divergence": {
            **asdict(compared.merged),
            "adapter_kl": compared.adapter_kl,
            "limit": compared.limit,
            "tokens_of": compared.source,
        },
    }
    there = {file.name: file for file in sorted(folder.iterdir())}
    card = card_of(run, merge=_told(session, merging, compared))
    made = {name: file for name, file in completed(without_paths(there), facts).items() if isinstance(file, bytes)}
    place(folder, {**made, CARD: card.encode()})


def _require_adapter(session: Session, run: RunFolder) -> None:
    if session.config.adapter is not None:
        return
    if kind_of(run.model) == "adapter":
        what, fix = "the adapter is to be merged, and adapter=null leaves it out", "take adapter=null away"
    else:
        what = "there is no adapter to merge: all weights of this model were trained"
        fix = "export it without --merge"
    raise InputError(what=what, where=str(run.path), fix=fix)


def _require_close(compared: Compared, merging: Merging, path: Path) -> None:
    found = compared.merged
    if found.mean_kl <= compared.limit:
        return
    if math.isnan(found.mean_kl):
        what = "the merged model's logits are not finite"
        is_overflow = merging.dtype == "fp16"
        looked = "look whether the run's own are: `brim evaluate RUN` shows its loss"
        fix = "its values do not fit fp16: use --dtype bf16" if is_overflow else looked
    else:
        what = f"the merged model differs from the unmerged one by {found.mean_kl:.3g} nats a token"
        other = "" if merging.dtype == "fp32" else ", or with --dtype fp32"
        fix = f"export the adapter without --merge{other}; if you accept the difference, raise --max-divergence"
    raise ExportError(
        what=f"{what} (mean KL divergence over {found.num_tokens:,} tokens of {compared.source}; "
        f"{found.same_top:.1%} of the likeliest tokens are the same); nothing was written",
        where=str(path),
        expected=f"at most {compared.limit:.3g}",
        fix=fix,
    )


def _told(session: Session, merging: Merging, compared: Compared) -> str:
    """Describe the merge for the card."""
    found = compared.merged
    quantization = session.config.quantization
    onto = "onto the base" + ("" if quantization is None else f", dequantised from {quantization.bits} bits")
    effect = "" if compared.adapter_kl is None else f" The adapter itself moves them by {compared.adapter_kl:.2g}."
    return (
        f"The adapter is part of the weights: added in fp32 {onto}, then rounded to {merging.dtype}. "
        f"Over {found.num_tokens:,} tokens of {compared.source}, the predictions of the merged model are "
        f"{found.mean_kl:.2g} nats a token from those of the unmerged one (mean KL divergence; the limit was "
        f"{compared.limit:g}).{effect} {found.same_top:.2%} of the likeliest tokens are the same; no logit differs by "
        f"more than {found.max_logit_difference:.2g}."
    )


def _notes(compared: Compared, merging: Merging) -> list[str]:
    """Warn of a merge that stays under the limit and still loses much of what was learned."""
    effect = compared.adapter_kl
    if effect is None or compared.merged.mean_kl <= SHARE * effect:
        return []
    fix = "" if merging.dtype == "fp32" else "; --dtype fp32 keeps more"
    return [
        f"merging moves the predictions by {compared.merged.mean_kl:.2g} nats a token, where the adapter itself moves "
        f"them by {effect:.2g}: much of what it learned is lost in the rounding{fix}"
    ]


# For runs whose data is gone. Prose, figures and code, since a model may have learned any of them.
_TEXT = """\
The ferry leaves the northern harbour at a quarter past seven and reaches the island before nine, unless the wind
has turned during the night. Passengers who carry bicycles board first. In March 2019 the crossing cost 12.50 euros; by
2024 the price had risen to 16.75, which is an increase of 34 per cent. Why did it rise so quickly? Fuel was one reason,
a new pier the other.

def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)

Question: A train covers 180 kilometres in two hours. How far does it travel in five hours at the same speed?
Answer: Its speed is 180 / 2 = 90 kilometres an hour, so in five hours it travels 5 * 90 = 450 kilometres.

{"name": "Ada", "year": 1843, "tags": ["notes", "engine"], "active": false}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Hold the rows whose supervised tokens both models predict."""

    rows: TokenRows
    source: str  # in words


def probe(session: Session, dataset: Data | None, say: Say) -> Probe:
    """Return validation rows of the run's data, or training rows where it has none; else a fixed text.

    dataset: another data set, of which all rows count; it must be readable, while the run's own may be gone.
    Raises DataError for a given data set that cannot be used.
    """
    if dataset is not None:
        rows = _rows(session, dataset, "full")
        if not len(rows):
            what = "the given data set has no rows to compare the merged model on"
            raise DataError(what=what, fix="give another with --dataset, or leave it out")
        return Probe(rows=rows, source="rows of the given data set")
    if session.config.dataset is not None:
        try:
            for split, words in (("validation", "validation rows"), ("train", "training rows")):
                rows = _rows(session, session.config.dataset, split)
                if len(rows):
                    return Probe(rows=rows, source=words)
        except InputError as error:
            say(f"the run's data cannot be used to compare with: {error.problems[0].what}")
    return _fixed(session)


def _rows(session: Session, dataset: Data, split: str) -> TokenRows:
    context = session.folder.context_length
    return prepare(read(dataset), session.config, session.encoder, context_length=context, only=split).splits[split]


def _fixed(session: Session) -> Probe:
    ids = session.encoder.encode([_TEXT], special_tokens=True)[0][: session.folder.context_length]
    row = TokenRow(key=0, input_ids=np.asarray(ids, dtype=np.int32), supervised=np.ones(len(ids), dtype=np.bool_))
    return Probe(rows=TokenRows.from_rows([row]), source="a fixed text, since the run's data was not found")


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
    _forget_quantization(base)
    return base


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

    if isinstance(original, nn.Embedding):
        original.weight = _frozen(weight.T, dtype)
        return original
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
        if known and isinstance(variant, DoraLinearVariant | DoraEmbeddingVariant) and not layer.lora_bias[adapter]:
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


def _forget_quantization(base: PreTrainedModel) -> None:
    """Remove what transformers notes on a quantised model, so that it is saved as a plain one."""
    model: Any = base
    if getattr(model, "hf_quantizer", None) is None:
        return
    model.hf_quantizer.remove_quantization_config(model)


def _is_quantised(layer: nn.Module) -> bool:
    """Compare names of types: bitsandbytes is imported only where it is used."""
    return type(layer).__name__ in ("Linear4bit", "Linear8bitLt") and type(layer).__module__.startswith("bitsandbytes")


def _is_transposed(layer: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D | nn.Embedding)
