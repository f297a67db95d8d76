"""What a plan cannot promise because something is dropped at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brim.config import Config, FinetuneTrainer
from brim.models.own_dropout import own_dropout

_ALIKE = "cut otherwise, under another memory, the losses are alike and not equal"


def dropout_notes(config: Config, base: Mapping[str, Any]) -> Iterator[str]:
    """config: resolved, with a training. base: the base model's settings, defaults among them (see own_dropout)."""
    trainer, adapter = config.trainer, config.adapter
    assert isinstance(trainer, FinetuneTrainer), "only training drops anything"
    rate = 0.0 if adapter is None else adapter.dropout
    if rate and not trainer.dropout_by_row:
        yield (
            f"adapter.dropout {rate:g} is drawn for the rows that go together: {_ALIKE}. "
            "trainer.dropout_by_row: true makes them equal"
        )
    if trainer.dropout_by_row and not rate:
        why = "there is no adapter" if adapter is None else "adapter.dropout is 0"
        yield f"trainer.dropout_by_row changes nothing: {why}"
    own = ", ".join(f"{name} {value:g}" for name, value in own_dropout(base).items())
    if own:
        by_row = ", which trainer.dropout_by_row leaves as it is" if trainer.dropout_by_row else ""
        yield f"the base model has dropout of its own ({own}){by_row}: {_ALIKE}"
