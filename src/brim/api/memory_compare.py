"""`brim memory --compare`: one model trained in several ways, side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from brim.api.memory import Question, answer, ask, check, question
from brim.api.memory_variants import Variant, variants
from brim.config import Config
from brim.errors import InputError, Problem
from brim.memory.device import devices
from brim.memory.prediction import MemoryPrediction
from brim.memory.sharding import Offload


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """What one way takes on a card of the catalogue, in the precision that the card has."""

    name: str
    total_bytes: int
    fits: bool
    gradient_checkpointing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One way to train, and what it takes."""

    variant: Variant
    prediction: MemoryPrediction
    cards: tuple[OnCard, ...]  # that can compute so, those of the least memory first

    @property
    def fits_on(self) -> tuple[str, ...]:
        """The names of those that are large enough."""
        return tuple(card.name for card in self.cards if card.fits)

    @property
    def smallest(self) -> OnCard | None:
        """The card of the least memory that is large enough."""
        return next((card for card in self.cards if card.fits), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction with the way's name, its settings, and each card's answer, for `--json`."""
        return {
            "name": self.variant.name,
            "changes": dict(self.variant.changes),
            "fits_on": list(self.fits_on),
            "cards": {
                card.name: {
                    "total_bytes": card.total_bytes,
                    "fits": card.fits,
                    "gradient_checkpointing": card.gradient_checkpointing,
                }
                for card in self.cards
            },
            **self.prediction.as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A way that cannot be, and why."""

    variant: Variant
    problems: tuple[Problem, ...]

    def as_dict(self) -> dict[str, Any]:
        problems = [str(problem) for problem in self.problems]
        return {"name": self.variant.name, "changes": dict(self.variant.changes), "problems": problems}


def compare_memory(
    config: Config,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    device: str | None = None,
    memory_bytes: int | None = None,
    world_size: int = 1,
    offload: Offload = "none",
    ways: Collection[str] | None = None,
) -> Iterator[Compared | Failed]:
    """A training step in each way, one after the other; ways that cannot be built come first, before any trace.

    ways: the names of those to look at; None: all. Raises the first way's error, as `predict_memory` does, where all
    fail.
    """
    errors: list[InputError] = []
    questions: list[tuple[Variant, Question]] = []
    failed: list[Failed] = []
    for variant in variants(config):
        if ways is not None and variant.name not in ways:
            continue
        try:
            asked = ask(variant.config, phase="train", device=device, memory_bytes=memory_bytes, batch_size=batch_size)
            found = question(
                asked,
                batch_size=batch_size,
                sequence_length=sequence_length,
                world_size=world_size,
                offload=offload,
            )
            check(found)
        except InputError as error:
            errors.append(error)
            failed.append(Failed(variant=variant, problems=error.problems))
        else:
            questions.append((variant, found))
    if questions:
        yield from failed
    num_found = 0
    for variant, found in questions:
        try:
            compared = _compared(variant, found, batch_size=batch_size)
        except InputError as error:
            errors.append(error)
            yield Failed(variant=variant, problems=error.problems)
        else:
            num_found += 1
            yield compared
    if num_found == 0:
        raise errors[0]


def _compared(variant: Variant, found: Question, *, batch_size: int | None) -> Compared:
    """The prediction for the device that is meant, and for each card, of whose kinds few take a trace of their own."""
    prediction = answer(found)
    cards = []
    by_arithmetic: dict[bool, Question] = {}
    for card in sorted(devices(), key=lambda each: each.memory_bytes):
        if variant.config.precision == "bf16-true" and not card.has_bf16:
            continue  # it would compute so, slowly, in fp32
        if card.has_bf16 not in by_arithmetic:
            asked = ask(variant.config, phase="train", device=card.name, memory_bytes=None, batch_size=batch_size)
            by_arithmetic[card.has_bf16] = replace(found, asked=asked)
        like = by_arithmetic[card.has_bf16]
        on_card = answer(replace(like, asked=replace(like.asked, device=card)), shows_other=False)
        cards.append(
            OnCard(
                name=card.name,
                total_bytes=on_card.total_bytes,
                fits=on_card.fits is True,
                gradient_checkpointing=on_card.gradient_checkpointing is True,
            )
        )
    return Compared(variant=variant, prediction=prediction, cards=tuple(cards))
