"""Merge an adapter into its base model, and write it if it agrees with the unmerged model.

Merging puts plain 16-bit weights in place of quantised ones and low-rank updates. The two models are compared on the
tokens of a probe: validation rows of the run, its training rows where it has none, else a fixed text.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch

from brim.data import prepare
from brim.data.read import Data, read
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import DataError, ExportError, InputError
from brim.infer.metrics import Divergence, Runner
from brim.models import load_base, load_llm, merge_adapter, no_library_bars, no_library_warnings, precision
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
    from transformers import PreTrainedModel


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


_SHARD = "5GB"


_FEW_ROWS = 2  # at once: all of their logits are in memory beside those of the other model


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """Say how an adapter is merged."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    max_divergence: float | None = None  # mean KL divergence, nats a token; None: see Divergence.limit_of
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
        pad_id=session.encoder.pad_id, batch_rows=rows if isinstance(rows, int) else _FEW_ROWS, device=session.device
    )
    llm = load_llm(session.config, session.folder, session.device, trainable=False, keeps_digits=True)
    before = list(how.logits(llm.model, asked.rows, llm.precision))
    adapter_kl = how.adapter_kl(llm.model, asked.rows, llm.precision, before=before)
    merged = merge_adapter(cast(Any, llm.model), dtype=DTYPES[merging.dtype])
    del llm
    num_bytes = sum(weight.numel() * weight.element_size() for weight in merged.parameters())
    with filling(path, num_bytes=num_bytes) as folder, no_library_bars():
        merged.save_pretrained(str(folder), max_shard_size=_SHARD)
        del merged
        learned = files_of(run.model)
        place(folder, {name: file for name, file in learned.items() if name not in ADAPTER})
        found = Divergence.between(before, how.logits(_read_back(folder, session), asked.rows, precision("fp32")))
        limit = merging.max_divergence if merging.max_divergence is not None else Divergence.limit_of(adapter_kl)
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
    if effect is None or compared.merged.mean_kl <= Divergence.SHARE * effect:
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
