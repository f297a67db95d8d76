"""A run's adapter merged into its base model, compared with the unmerged model, and written if the two agree."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from brim.api.export import check_target, filling, place, size_of
from brim.api.merge_probe import Probe, probe
from brim.api.package import CARD, card_of, completed, files_of, kind_of, without_paths
from brim.api.results import ExportResult
from brim.api.session import Say, Session
from brim.data import Data
from brim.errors import ExportError, InputError, Problem
from brim.infer.divergence import Divergence, Runner, divergence, logits_of
from brim.models.folder import locate
from brim.models.llm import LLM, load_llm
from brim.models.load import load_base
from brim.models.merge import merge_adapter
from brim.models.precision import precision
from brim.models.quiet import no_library_bars, no_library_warnings
from brim.train.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The default limit, in nats a token (docs/export.md has the reasons).
MOST = 0.01  # 1% of perplexity
LEAST = 0.001  # what arithmetic in 16 bits costs anyhow
SHARE = 0.1  # of what the adapter does

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SHARD = "5GB"
_FEW_ROWS = 2  # at once: all of their logits stand beside those of the other model
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """How an adapter is merged."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    max_divergence: float | None = None  # mean KL divergence, nats a token; None: see limit_of
    dataset: Data | None = None  # whose rows the two models are compared on; default: the run's validation rows


def merging_of(merge: bool, **given: Any) -> Merging:
    """Arguments of Merging as a person typed them; None stands for the default. Raises InputError."""
    typed = {name: value for name, value in given.items() if value is not None}
    dtype, most = typed.get("dtype", "bf16"), typed.get("max_divergence", 0.0)
    if typed and not merge:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
        what = f"{options} acts on merged weights, and nothing is merged"
        raise InputError(Problem(what=what, fix="add --merge, or leave it out"))
    if dtype not in DTYPES:
        raise InputError(
            Problem(what=f"there is no dtype {dtype!r}", expected=", ".join(DTYPES), fix="choose one with --dtype")
        )
    if not most >= 0:
        what = f"--max-divergence is {most:g}"
        raise InputError(Problem(what=what, expected="nats a token: 0 or more", fix="leave it out for the default"))
    return Merging(**typed)


def limit_of(adapter_kl: float | None) -> float:
    """How far merging may move predictions: a tenth of what the adapter does, from 0.001 to 0.01 nats a token.

    adapter_kl: how far the base without the adapter is from the model; where that is unknown, 0.01.
    """
    return MOST if adapter_kl is None else min(MOST, max(LEAST, SHARE * adapter_kl))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was found when merged and unmerged were compared."""

    merged: Divergence  # from the unmerged model
    adapter_kl: float | None  # how far the base without the adapter is from it; None where it cannot be had
    source: str  # of the tokens
    limit: float


@no_library_warnings()
def merge_run(run: RunFolder, session: Session, path: Path, merging: Merging, *, say: Say) -> ExportResult:
    """Write a plain transformers model into a new or an empty folder.

    Two models are never in memory together: the unmerged one's logits are kept (half a GiB at most), it turns into the
    merged one layer by layer, that is written, let go, read back as anybody would read it, and compared.
    Raises ExportError, leaving nothing behind, when the two differ by more than the limit.
    """
    check_target(path, run)
    _require_adapter(session, run)
    asked = probe(session, merging.dataset, say)
    how = Runner(pad_id=session.encoder.pad_id, batch_rows=_batch_rows(session), device=session.device)
    llm = load_llm(session.config, session.folder, session.device, trainable=False, keeps_digits=True)
    before = list(logits_of(llm.model, asked.rows, how, llm.precision))
    adapter_kl = _effect(llm, before, asked, how)
    merged = merge_adapter(cast(Any, llm.model), dtype=DTYPES[merging.dtype])
    del llm
    num_bytes = sum(weight.numel() * weight.element_size() for weight in merged.parameters())
    with filling(path, num_bytes=num_bytes) as folder, no_library_bars():
        merged.save_pretrained(str(folder), max_shard_size=_SHARD)
        del merged
        learned = files_of(run.model)
        place(folder, {name: file for name, file in learned.items() if name not in _ADAPTER_FILES})
        found = divergence(before, logits_of(_read_back(folder, session), asked.rows, how, precision("fp32")))
        limit = merging.max_divergence if merging.max_divergence is not None else limit_of(adapter_kl)
        compared = Compared(merged=found, adapter_kl=adapter_kl, source=asked.source, limit=limit)
        _require_close(compared, merging, path)
        _complete(folder, run, session, merging, compared)
    for line in _notes(compared, merging):
        say(line)
    return ExportResult(path=path, kind="merged", num_bytes=size_of(path), divergence=found, probe=asked.source)


def _read_back(folder: Path, session: Session) -> PreTrainedModel:
    """The model as plain transformers opens it: in the dtype of its files, with arithmetic in that dtype."""
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
    """How far the base alone is from the adapted model; where biases were trained, PEFT cannot take them off again."""
    model: Any = llm.model
    if any(settings.bias != "none" for settings in model.peft_config.values()):
        return None
    with model.disable_adapter():
        return divergence(before, logits_of(model, asked.rows, how, llm.precision)).mean_kl


def _complete(folder: Path, run: RunFolder, session: Session, merging: Merging, compared: Compared) -> None:
    """The files beside the weights, with the figures."""
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
    raise InputError(Problem(what=what, where=str(run.path), fix=fix))


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
        Problem(
            what=f"{what} (mean KL divergence over {found.num_tokens:,} tokens of {compared.source}; "
            f"{found.same_top:.1%} of the likeliest tokens are the same); nothing was written",
            where=str(path),
            expected=f"at most {compared.limit:.3g}",
            fix=fix,
        )
    )


def _told(session: Session, merging: Merging, compared: Compared) -> str:
    """The merge, for the card."""
    found = compared.merged
    bits = _bits(session)
    onto = f"onto the base, dequantised from {bits} bits" if bits else "onto the base"
    effect = "" if compared.adapter_kl is None else f" The adapter itself moves them by {compared.adapter_kl:.2g}."
    return (
        f"The adapter is part of the weights: added in fp32 {onto}, then rounded to {merging.dtype}. "
        f"Over {found.num_tokens:,} tokens of {compared.source}, the predictions of the merged model are "
        f"{found.mean_kl:.2g} nats a token from those of the unmerged one (mean KL divergence; the limit was "
        f"{compared.limit:g}).{effect} {found.same_top:.2%} of the likeliest tokens are the same; no logit differs by "
        f"more than {found.max_logit_difference:.2g}."
    )


def _notes(compared: Compared, merging: Merging) -> list[str]:
    """What to tell of a merge that stays under the limit and still loses much of what was learned."""
    effect = compared.adapter_kl
    if effect is None or compared.merged.mean_kl <= SHARE * effect:
        return []
    fix = "" if merging.dtype == "fp32" else "; --dtype fp32 keeps more"
    return [
        f"merging moves the predictions by {compared.merged.mean_kl:.2g} nats a token, where the adapter itself moves "
        f"them by {effect:.2g}: much of what it learned is lost in the rounding{fix}"
    ]


def _bits(session: Session) -> int | None:
    quantization = session.config.quantization
    return quantization.bits if quantization is not None else None


def _batch_rows(session: Session) -> int:
    trainer: Any = session.config.trainer
    given = trainer.eval_batch_size
    return _FEW_ROWS if given in ("auto", None) else int(given)
