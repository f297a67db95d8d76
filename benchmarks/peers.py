"""Run the same training through other trainers: transformers' Trainer and TRL's SFTTrainer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.subject import EFFECTIVE_BATCH_SIZE, SEED
from brim.data.tokens import TokenRow

Peer = Literal["transformers", "trl"]

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Hold what brim's configuration says, in the words of TrainingArguments."""

    learning_rate: float
    schedule: Literal["constant", "cosine"]
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    learning_rates: tuple[float, ...] | None = None  # of each step, instead of the schedule
    averages_micro_batches: bool = False  # each micro-batch's mean counts alike; transformers alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Hold what a trainer logged, one figure a step."""

    losses: list[float]
    learning_rates: list[float]


def train_with(
    peer: Peer,
    rows: Sequence[TokenRow],
    *,
    base: Path,
    adapter: Path | None,
    settings: PeerSettings,
    micro_batch_rows: int,
) -> Steps:
    """Train one epoch over the rows in their order, from the weights in these folders.

    adapter: a PEFT folder; None trains all weights. Raises SystemExit when the peer is not installed.
    """
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    model, tokenizer = _load(base, adapter), AutoTokenizer.from_pretrained(base)
    with tempfile.TemporaryDirectory() as folder:
        build = _transformers_trainer if peer == "transformers" else _trl_trainer
        trainer = build(
            model, tokenizer, rows, _optimizers(model, settings), common_arguments(settings, micro_batch_rows, folder)
        )
        trainer.remove_callback(PrinterCallback)
        if settings.averages_micro_batches:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Steps(
        losses=[float(entry["loss"]) for entry in logged],
        learning_rates=[float(entry["learning_rate"]) for entry in logged],
    )


def _load(base: Path, adapter: Path | None) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return model if adapter is None else PeftModel.from_pretrained(model, adapter, is_trainable=True)


def common_arguments(settings: PeerSettings, micro_batch_rows: int, folder: str) -> dict[str, Any]:
    """Return TrainingArguments for one epoch in fp32 on the CPU."""
    return {
        "output_dir": folder,
        "num_train_epochs": 1,
        "per_device_train_batch_size": micro_batch_rows,
        "gradient_accumulation_steps": EFFECTIVE_BATCH_SIZE // micro_batch_rows,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": settings.warmup_steps,
        "optim": "adamw_torch",
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "train_sampling_strategy": "sequential",  # the rows are in brim's order already
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": SEED,
    }


def _optimizers(model: Any, settings: PeerSettings) -> tuple[Any, Any]:
    """Return (None, None), so that the peer makes its own; or AdamW under the given learning rates."""
    if settings.learning_rates is None:
        return None, None
    import torch

    rates = settings.learning_rates
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=settings.weight_decay)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)])


def _transformers_trainer(
    model: Any, tokenizer: Any, rows: Sequence[TokenRow], optimizers: tuple[Any, Any], arguments: dict[str, Any]
) -> Any:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    return Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=as_dataset(rows),
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
        optimizers=optimizers,
    )


def _trl_trainer(
    model: Any, tokenizer: Any, rows: Sequence[TokenRow], optimizers: tuple[Any, Any], arguments: dict[str, Any]
) -> Any:
    try:
        from trl import SFTConfig, SFTTrainer
    except ImportError:
        raise SystemExit("TRL is not installed; install it with: pip install 'brim[peers]'") from None
    arguments = {
        **arguments,
        "max_length": None,
        "packing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(**arguments),
        train_dataset=as_dataset(rows),
        processing_class=tokenizer,
        optimizers=optimizers,
    )


def as_dataset(rows: Sequence[TokenRow]) -> Any:
    """Return rows with brim's tokens and targets."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "input_ids": row.input_ids.tolist(),
                "labels": [
                    token if learned else IGNORED
                    for token, learned in zip(row.input_ids.tolist(), row.supervised.tolist(), strict=True)
                ],
            }
            for row in rows
        ]
    )
