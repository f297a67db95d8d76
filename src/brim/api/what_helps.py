"""What would make a row fit that does not fit alone, each with what it would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brim.api.memory import predict_memory
from brim.api.memory_variants import variants
from brim.config import Config, FinetuneTrainer
from brim.errors import InputError
from brim.units import format_bytes

_SMALL_STATES = {"adam": "adam_8bit", "adamw": "adamw_8bit"}
_MOVED_STATES = {
    "adam": "paged_adam_8bit",
    "adamw": "paged_adamw_8bit",
    "adam_8bit": "paged_adam_8bit",
    "adamw_8bit": "paged_adamw_8bit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """One change to the configuration."""

    label: str  # "4-bit weights"
    fix: str  # "quantization: {bits: 4}"
    total_bytes: int  # reserved and outside, of a step's micro-batches

    def __str__(self) -> str:
        return f"{self.label} ({format_bytes(self.total_bytes)}): {self.fix}"

    def not_enough(self, room_bytes: int) -> str:
        """Say how far it goes, where so much may be used."""
        there = f"{format_bytes(self.total_bytes)}, still more than the {format_bytes(room_bytes)} that may be used"
        return f"{self.label} ({there}): {self.fix}"


def what_helps(
    config: Config, *, longest: int, rows: int = 1, device: str | None = None, memory_bytes: int | None = None
) -> tuple[Help, ...]:
    """The changes that lower what micro-batches of so many rows of `longest` tokens take, the largest change first.

    Beside each change the rest stays as it is; what says `auto` is taken at its least. What the device cannot do is
    left out. device, memory_bytes: as for `predict_memory`. Raises as it does where the configuration itself cannot be
    predicted.
    """

    def total_bytes(changed: Config) -> int:
        found = predict_memory(
            changed,
            batch_size=rows,
            sequence_length=longest,
            phase="train",
            device=device,
            memory_bytes=memory_bytes,
        )
        return found.total_bytes

    now_bytes = total_bytes(_at_its_least(config))
    helps = []
    for label, fix, changed in _changes(config):
        try:
            helps.append(Help(label=label, fix=fix, total_bytes=total_bytes(_at_its_least(changed))))
        except InputError:  # such as an optimizer that this device has no kernels for
            continue
    return tuple(sorted((each for each in helps if each.total_bytes < now_bytes), key=lambda each: each.total_bytes))


def _changes(config: Config) -> Iterator[tuple[str, str, Config]]:
    trainer = config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    if trainer.enable_gradient_checkpointing is False:
        fix = "trainer.enable_gradient_checkpointing: auto"
        yield "activation checkpointing", fix, _trainer(config, enable_gradient_checkpointing=True)
    if trainer.chunked_loss is False:
        yield "loss in chunks", "trainer.chunked_loss: auto", _trainer(config, chunked_loss="auto")
    kinds = {variant.name: variant for variant in variants(config)}
    if config.adapter is None:
        yield "an adapter", "adapter: {type: lora}", kinds["LoRA"].config
    if config.quantization is None or config.quantization.bits == 8:
        also = "" if config.adapter is not None else ", with adapter: {type: lora}"
        yield "4-bit weights", f"quantization: {{bits: 4}}{also}", kinds["4-bit + LoRA"].config
    kind = trainer.optimizer.type
    for label, kinds_of in (
        ("8-bit optimizer states", _SMALL_STATES),
        ("optimizer states beside the GPU", _MOVED_STATES),
    ):
        if kind in kinds_of:
            fix = f"trainer.optimizer.type: {kinds_of[kind]}"
            yield label, fix, _with_optimizer(config, kinds_of[kind])


def _at_its_least(config: Config) -> Config:
    """`auto` checkpoints where nothing else fits; without a plan it would not."""
    trainer = config.trainer
    if isinstance(trainer, FinetuneTrainer) and trainer.enable_gradient_checkpointing == "auto":
        return _trainer(config, enable_gradient_checkpointing=True)
    return config


def _with_optimizer(config: Config, kind: str) -> Config:
    given = config.model_dump(exclude_unset=True)
    given["trainer"] = {**given["trainer"], "optimizer": {"type": kind}}
    return Config.model_validate(given)


def _trainer(config: Config, **update: Any) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})
