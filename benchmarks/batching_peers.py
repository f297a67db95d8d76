"""Run one epoch through TRL's SFTTrainer, in each of the ways in which it can cut its batches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from benchmarks.batching_subject import CONTEXT_TOKENS, Subject
from benchmarks.peers import PeerSettings, as_dataset, common_arguments
from benchmarks.subject import EFFECTIVE_BATCH_SIZE
from brim.data.tokens import TokenRow

Way = Literal["fixed", "group_by_length", "padding_free", "packing", "auto_find"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEpoch:
    """Hold what one epoch took and gave."""

    train_s: float
    losses: list[float]  # of each update
    num_tokens: int  # real ones
    num_padded_tokens: int  # that went through the model
    micro_batch_rows: int  # in the end; with packing, packs


def train_epoch(
    way: Way,
    rows: Sequence[TokenRow],
    *,
    subject: Subject,
    micro_batch_rows: int,
    accumulation_steps: int,
    trained: Path,
) -> PeerEpoch:
    """Train on the rows and write the adapter to `trained`. Only `trainer.train()` is timed.

    With `fixed`, `padding_free` and `auto_find` the rows come in the order in which they are given; `group_by_length`
    and `packing` have an order of their own.
    """
    from transformers.trainer_callback import PrinterCallback

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(way, rows, subject, _arguments(way, subject, micro_batch_rows, accumulation_steps, folder))
        trainer.remove_callback(PrinterCallback)
        trainer.data_collator = collator = _Counting(trainer.data_collator)
        num_tokens = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
        started = time.perf_counter()
        trainer.train()
        train_s = time.perf_counter() - started
    trainer.model.save_pretrained(str(trained))
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return PeerEpoch(
        train_s=train_s,
        losses=losses,
        num_tokens=num_tokens,
        num_padded_tokens=collator.num_padded_tokens,
        micro_batch_rows=trainer._train_batch_size,
    )


def accumulation_of_packs(lengths: Sequence[int], *, micro_batch_packs: int) -> int:
    """Return micro-batches of packs whose update sees about as many rows as an effective batch, at least one."""
    packs_per_step = EFFECTIVE_BATCH_SIZE * sum(lengths) / len(lengths) / CONTEXT_TOKENS
    return max(round(packs_per_step / micro_batch_packs), 1)


def kernels() -> dict[str, str | None]:
    """Return what the peers run with beside plain PyTorch; None where it is not installed."""
    import importlib.metadata

    return {
        name: importlib.metadata.version(name) if find_spec(module) else None
        for name, module in (("liger-kernel", "liger_kernel"), ("flash-attn", "flash_attn"))
    }


class _Counting:
    """Count the tokens of the rows that are collated and handed on."""

    def __init__(self, collator: Any) -> None:
        self._collator = collator
        self.num_padded_tokens = 0

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        batch = self._collator(examples)
        self.num_padded_tokens += batch["input_ids"].numel()
        return batch


def _arguments(
    way: Way, subject: Subject, micro_batch_rows: int, accumulation_steps: int, folder: str
) -> dict[str, Any]:
    trainer = subject.settings()["trainer"]
    settings = PeerSettings(
        learning_rate=trainer["learning_rate"], schedule=trainer["learning_rate_scheduler"]["decay"]
    )
    arguments = {
        **common_arguments(settings, micro_batch_rows, folder),
        "gradient_accumulation_steps": accumulation_steps,
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    if subject.device == "cuda":
        arguments.update({"use_cpu": False, "bf16": True, "use_liger_kernel": kernels()["liger-kernel"] is not None})
    return {**arguments, **OF_WAY[way]}


OF_WAY: Mapping[Way, dict[str, Any]] = {
    "fixed": {},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "padding_free": {"padding_free": True},
    # Packs are made longest rows first: in their own order each step would see rows of one length.
    "packing": {
        "packing": True,
        "max_length": CONTEXT_TOKENS,
        "dataset_kwargs": {},
        "train_sampling_strategy": "random",
    },
    "auto_find": {"auto_find_batch_size": True},
}


def _trainer(way: Way, rows: Sequence[TokenRow], subject: Subject, arguments: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        from trl import SFTConfig, SFTTrainer
    except ImportError:
        raise SystemExit("TRL is not installed; install it with: pip install 'brim[peers]'") from None
    return SFTTrainer(
        model=_load(subject, flat=way in ("padding_free", "packing")),
        args=SFTConfig(**arguments),
        train_dataset=as_dataset(rows),
        processing_class=AutoTokenizer.from_pretrained(subject.base),
    )


def _load(subject: Subject, *, flat: bool) -> Any:
    """Load the base and the adapter that all start from. flat: rows are laid end to end, for which TRL advises Flash
    Attention; without it, transformers masks them apart."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    has_flash = subject.device == "cuda" and kernels()["flash-attn"] is not None
    model = AutoModelForCausalLM.from_pretrained(
        subject.base,
        dtype=torch.bfloat16 if subject.device == "cuda" else torch.float32,
        attn_implementation="flash_attention_2" if flat and has_flash else "sdpa",
    )
    return PeftModel.from_pretrained(model, subject.adapter, is_trainable=True)
