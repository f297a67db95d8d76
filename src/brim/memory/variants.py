"""Compare variants of training one model, explain a prediction, and suggest what would make a row fit.

`brim memory --compare` puts the variants side by side, from all weights in 32 bits to an adapter on a 4-bit base:
each changes some keys of the configuration. `brim memory --explain` shows the closed form of what was predicted.
For a row that does not fit alone, each change that helps comes with what it would take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from brim.config import DeviceFacts, resolve
from brim.config.schema import AdamWConfig, Config, FinetuneTrainer, LoraConfig, QuantizationConfig
from brim.errors import InputError, Problem
from brim.memory.closed_form import Napkin, napkin, settings_of
from brim.memory.devices import devices, find_device
from brim.memory.predict import Question, answer, ask, check, predict_memory, question, with_checkpointing
from brim.memory.prediction import MemoryPrediction, Offload
from brim.models import read_architecture, with_stored_quantization
from brim.models.folders import locate
from brim.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """Hold what a variant takes on a card of the catalogue, in the precision that the card has."""

    name: str
    total_bytes: int
    fits: bool
    gradient_checkpointing: bool | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Hold a variant of training, and what it takes."""

    variant: Variant
    prediction: MemoryPrediction
    cards: tuple[OnCard, ...]  # those that can compute in its precision, ascending by memory

    @property
    def fits_on(self) -> tuple[str, ...]:
        """Return the names of the cards that are large enough."""
        return tuple(card.name for card in self.cards if card.fits)

    @property
    def smallest(self) -> OnCard | None:
        """Return the card with the least memory that is large enough."""
        return next((card for card in self.cards if card.fits), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction with the variant's name, its settings, and each card's answer, for `--json`."""
        return {
            "name": self.variant.name,
            "changes": dict(self.variant.changes),
            "fits_on": list(self.fits_on),
            "cards": {
                card.name: {key: value for key, value in asdict(card).items() if key != "name"} for card in self.cards
            },
            **self.prediction.as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Hold a variant that cannot be built, and why."""

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
    offload: Offload | None = None,
    ways: Collection[str] | None = None,
) -> Iterator[Compared | Failed]:
    """Predict a training step in each variant, in turn; those that cannot be built come first, before any trace.

    ways: the names of the variants to look at; None: all. Raises the first one's error, as `predict_memory` does, where
    all fail.
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
    """Predict for the target device, and for each card; only a few kinds of card need a trace of their own."""
    prediction = answer(found)
    cards = []
    by_arithmetic: dict[bool, Question | None] = {}  # None: the configuration asks for what such cards cannot do
    for card in sorted(devices(), key=lambda each: each.memory_bytes):
        if variant.config.precision == "bf16-true" and not card.has_bf16:
            continue  # it could compute in bf16, but slowly, by way of fp32
        if card.has_bf16 not in by_arithmetic:
            by_arithmetic[card.has_bf16] = _on_card(variant, found, card.name, batch_size=batch_size)
        like = by_arithmetic[card.has_bf16]
        if like is None:
            continue
        on_card = answer(replace(like, asked=replace(like.asked, device=card)), shows_other=False)
        cards.append(
            OnCard(
                name=card.name,
                total_bytes=on_card.total_bytes,
                fits=on_card.fits is True,
                gradient_checkpointing=on_card.gradient_checkpointing or False,
            )
        )
    return Compared(variant=variant, prediction=prediction, cards=tuple(cards))


def _on_card(variant: Variant, found: Question, name: str, *, batch_size: int | None) -> Question | None:
    """Return the question for a card; None where it cannot do what the configuration asks for."""
    try:
        asked = ask(variant.config, phase="train", device=name, memory_bytes=None, batch_size=batch_size)
    except InputError:
        return None
    return replace(found, asked=asked)


def explain_memory(config: Config, prediction: MemoryPrediction) -> Napkin:
    """Work out a prediction in closed form, line by line. config: the one that was predicted for."""
    folder = locate(
        config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code, config_only=True
    )
    settled = with_stored_quantization(config, folder)
    facts = DeviceFacts(kind="cuda", bf16=_has_bf16(prediction.device))
    resolved = resolve(settled, facts, context_length=folder.context_length).config
    if prediction.gradient_checkpointing is not None:
        resolved = with_checkpointing(resolved, prediction.gradient_checkpointing)
    # What config.json leaves to transformers' defaults is filled in.
    base = {**read_architecture(folder, trust_remote_code=config.trust_remote_code).to_dict(), **folder.config}
    settings = settings_of(
        resolved,
        base,
        phase=prediction.phase,
        batch_size=prediction.batch_size,
        sequence_length=prediction.sequence_length,
        world_size=prediction.world_size,
        chunked_loss=prediction.has_chunked_loss,
    )
    return napkin(base, settings)


def _has_bf16(device: str) -> bool:
    try:
        return find_device(device).has_bf16
    except InputError:  # a device of which only the memory is known, or the local one
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """Hold one change to the configuration that would help."""

    label: str  # "4-bit weights"
    fix: str  # "quantization: {bits: 4}"
    total_bytes: int  # reserved and outside, of a step's micro-batches

    def __str__(self) -> str:
        return f"{self.label} ({format_bytes(self.total_bytes)}): {self.fix}"

    def not_enough(self, usable_bytes: int) -> str:
        """Say how far it goes, where so much may be used."""
        there = f"{format_bytes(self.total_bytes)}, still more than the {format_bytes(usable_bytes)} that may be used"
        return f"{self.label} ({there}): {self.fix}"


def what_helps(
    config: Config,
    *,
    longest: int,
    rows: int = 1,
    device: str | None = None,
    memory_bytes: int | None = None,
    world_size: int = 1,
) -> tuple[Help, ...]:
    """Suggest changes that lower what micro-batches of `rows` rows of `longest` tokens take, the most helpful first.

    With each change the rest stays as it is, and `auto` stands for what takes the least. What the device cannot do is
    left out. device, memory_bytes, world_size: as for `predict_memory`. Raises as it does where the configuration
    itself cannot be predicted.
    """

    def total_bytes(changed: Config) -> int:
        found = predict_memory(
            changed,
            batch_size=rows,
            sequence_length=longest,
            phase="train",
            device=device,
            memory_bytes=memory_bytes,
            world_size=world_size,
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
    if trainer.enable_gradient_checkpointing not in (True, "auto"):
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
    kind = trainer.optimizer.type.removesuffix("_8bit")
    if kind in ("adam", "adamw"):
        if trainer.optimizer.type == kind:
            yield "8-bit optimizer states", *_with_optimizer(config, f"{kind}_8bit")
        yield "optimizer states beside the GPU", *_with_optimizer(config, f"paged_{kind}_8bit")


def _at_its_least(config: Config) -> Config:
    """Turn checkpointing on where it is `auto`: a plan would do so where nothing else fits."""
    trainer = config.trainer
    if isinstance(trainer, FinetuneTrainer) and trainer.enable_gradient_checkpointing == "auto":
        return _trainer(config, enable_gradient_checkpointing=True)
    return config


def _with_optimizer(config: Config, kind: str) -> tuple[str, Config]:
    given = config.model_dump(exclude_unset=True)
    given["trainer"] = {**given["trainer"], "optimizer": {"type": kind}}
    return f"trainer.optimizer.type: {kind}", Config.model_validate(given)


def _trainer(config: Config, **update: Any) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Hold a variant of training: the configuration with some keys changed."""

    name: str
    changes: Mapping[str, str]  # key -> value, as in YAML; only what differs from the user's
    config: Config


def variants(config: Config) -> tuple[Variant, ...]:
    """Return the variants full, 16-bit, LoRA, 8-bit and 4-bit (QLoRA), each with the user's other settings.

    The configuration's own adapter and quantization are kept where the variant has one. A configuration that does not
    train is predicted as training with AdamW. Biases do not train beside 16-bit or quantised weights. The precision is
    that of the device; `16-bit`, in which small updates are lost, is bfloat16 and for cards that have it.
    """
    adapter = config.adapter or LoraConfig(type="lora")
    if adapter.bias_type != "none":
        adapter = adapter.model_copy(update={"bias_type": "none"})
    given = config.quantization
    eight, four = (given if given and given.bits == bits else QuantizationConfig(bits=bits) for bits in (8, 4))
    return (
        _variant(config, "full", precision="auto", adapter=None, quantization=None),
        _variant(config, "16-bit", precision="bf16-true", adapter=None, quantization=None),
        _variant(config, "LoRA", precision="auto", adapter=adapter, quantization=None),
        _variant(config, "8-bit + LoRA", precision="auto", adapter=adapter, quantization=eight),
        _variant(config, "4-bit + LoRA", precision="auto", adapter=adapter, quantization=four),
    )


def _variant(config: Config, name: str, **keys: Any) -> Variant:
    if not isinstance(config.trainer, FinetuneTrainer):
        keys["trainer"] = FinetuneTrainer(optimizer=AdamWConfig(), batch_size=config.trainer.batch_size)
    if config.initialize == "random":
        keys["initialize"] = "pretrained"  # random weights have neither an adapter nor a quantization
    changes = {key: _as_yaml(key, value) for key, value in keys.items() if value != getattr(config, key)}
    return Variant(name=name, changes=changes, config=config.model_copy(update=keys))


def _as_yaml(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, QuantizationConfig):
        return f"{{bits: {value.bits}}}"
    if isinstance(value, LoraConfig):
        return f"{{type: lora, r: {value.r}}}"
    return "{type: finetune, optimizer: adamw}" if key == "trainer" else str(value)
