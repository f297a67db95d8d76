"""Predict what a configuration takes on a GPU, without the GPU and without the weights (`brim.predict_memory`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from brim.config import WAYS as WAYS_TO_MOVE, Choice, DeviceFacts, Resolution, default_rows, load_config, resolve
from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError, InputError, ModelError
from brim.memory.allocator import AllocatorSettings
from brim.memory.devices import Device, budget_of, device_at_hand, device_of, find_device
from brim.memory.events import Phase
from brim.memory.prediction import MOST_GPUS, MOST_MEMORY_BYTES, MOST_ROWS, MOST_TOKENS, MemoryPrediction, Offload
from brim.memory.traces import LEAST_TOKENS, Job, Traces, tracing
from brim.models import (
    no_library_warnings,
    read_architecture,
    require_trainable,
    stored_choices,
    with_stored_quantization,
)
from brim.models.folders import ModelFolder, locate, require_floors, without_auto_map
from brim.models.kernels import execution_choices
from brim.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from brim.memory.fsdp import Sharding


@no_library_warnings()
def predict_memory(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    phase: Phase | None = None,
    device: str | None = None,
    memory_bytes: int | None = None,
    world_size: int = 1,
    offload: Offload | None = None,
    allocator: str | None = None,
) -> MemoryPrediction:
    """Predict what a phase of a run takes: bytes allocated and reserved by PyTorch, and in all.

    config: a YAML file or a mapping; of its base model only config.json is needed. batch_size: rows of a micro-batch;
    None: as the configuration says. sequence_length: tokens of each row, or of each prompt when generating.
    phase: None: train if the configuration trains, else generate. device: a name in the catalogue. memory_bytes: the
    memory of any other device; with neither, the local GPU is meant. world_size: GPUs over which FSDP shards weights,
    gradients and state. offload: what is kept on the CPU: the optimizer with its state, or weights and gradients, too;
    None: of what trains, as memory.offload says. Where the device is the CPU itself, its memory holds all.
    allocator: settings as in PYTORCH_ALLOC_CONF, which is read if this is None.

    Threads that predict wait for each other; no model may run in another thread meanwhile.

    Raises ConfigError, ModelError and InputError, each naming what is wrong and what to do.
    """
    if batch_size is not None:
        require_whole("batch_size", batch_size, most=MOST_ROWS)
    asked = ask(config, phase=phase, device=device, memory_bytes=memory_bytes, batch_size=batch_size)
    return answer(
        question(
            asked,
            batch_size=batch_size,
            sequence_length=sequence_length,
            world_size=world_size,
            offload=offload,
            allocator=allocator,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Hold a configuration that is resolved for the target device."""

    config: Config
    choices: tuple[Choice, ...]
    folder: ModelFolder
    architecture: PretrainedConfig
    phase: Phase
    device: Device
    has_limit: bool

    def reopened(self, key: str) -> Asked:
        """Return it with a key that was left open open again, for who knows more of it."""
        choices = tuple(choice for choice in self.choices if choice.key != key)
        return replace(self, config=self.config.having(key, "auto"), choices=choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Hold all that is to be predicted. Replace the device in `asked` to ask for another one; traces are shared."""

    asked: Asked
    traces: Traces
    choices: tuple[str, ...]  # those of shape and sharding, to be shown


def ask(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    phase: Phase | None,
    device: str | None,
    memory_bytes: int | None,
    batch_size: int | None = None,
) -> Asked:
    """Resolve a configuration for a device; arguments and errors as in `predict_memory`. Loads no weights."""
    require_floors()
    if phase is not None:
        _require_one_of("phase", phase, get_args(Phase))
    target, has_limit = _device(device, memory_bytes)
    given = config if isinstance(config, Config) else load_config(config).config
    folder = locate(
        given.base_model, initialize=given.initialize, trust_remote_code=given.trust_remote_code, config_only=True
    )
    settled = with_stored_quantization(given, folder)
    require_trainable(settled, folder)
    facts = DeviceFacts(kind="cpu" if target.is_cpu else "cuda", bf16=target.has_bf16)
    resolution = resolve(_of_micro_batches(settled, batch_size), facts, context_length=folder.context_length)
    trains = isinstance(resolution.config.trainer, FinetuneTrainer)
    if phase == "train" and not trains:
        raise InputError(
            what="the phase is train, but the configuration does not train",
            where="trainer.type",
            fix="set trainer.type: finetune, or ask for the phase generate or evaluate",
        )
    phase = phase or ("train" if trains else "generate")
    if phase == "generate" and resolution.config.output_features[0].labels:
        resolution = _with_length_of_labels(resolution, folder, trust_remote_code=given.trust_remote_code)
    architecture = read_architecture(folder, trust_remote_code=given.trust_remote_code)
    resolution = _with_execution(
        resolution, architecture, target, phase=phase, is_at_hand=device is None and memory_bytes is None
    )
    return Asked(
        config=resolution.config,
        choices=(*_own_code(given, folder), *stored_choices(given, folder), *resolution.choices),
        folder=folder,
        architecture=architecture,
        phase=phase,
        device=target,
        has_limit=has_limit,
    )


def _with_length_of_labels(resolution: Resolution, folder: ModelFolder, *, trust_remote_code: bool) -> Resolution:
    """Return the resolution with as many new tokens as the labels take; unchanged where there is no tokenizer."""
    from brim.data.tokens import load_encoder  # here, since most questions need no tokenizer
    from brim.session import with_length_of_labels

    try:
        encoder = load_encoder(folder, trust_remote_code=trust_remote_code)
    except ModelError:
        return resolution
    return with_length_of_labels(resolution, encoder)


def _with_execution(
    resolution: Resolution, architecture: PretrainedConfig, target: Device, *, phase: Phase, is_at_hand: bool
) -> Resolution:
    """Return the resolution with the rows' layout and the layers' kernels chosen, where that is open."""
    config = resolution.config
    if phase not in ("train", "load"):  # a model that is loaded to be run computes by its own operators
        config = config.having("model_parameters.kernels", "torch")
    at_hand = torch.device("cuda") if is_at_hand and torch.cuda.is_available() else None
    choices = execution_choices(config, lambda: architecture, capability=target.gpu_capability, at_hand=at_hand)
    return replace(resolution, config=Choice.made_in(config, choices), choices=(*resolution.choices, *choices))


def _own_code(config: Config, folder: ModelFolder) -> list[Choice]:
    """Say that the prediction is not for the classes that a folder brings."""
    if config.trust_remote_code or without_auto_map(folder.config) is folder.config:
        return []
    reason = "auto_map in config.json names code of its own, which is not run; `brim train` refuses it: remove auto_map"
    return [Choice(key="base_model", value=f"transformers' own {folder.config['model_type']}", reason=reason)]


def _of_micro_batches(config: Config, rows: int | None) -> Config:
    """Return the configuration with micro-batches of `rows`; whether a step takes several of them stays as it is."""
    trainer = config.trainer
    if rows is None or not isinstance(trainer, FinetuneTrainer):
        return config
    update: dict[str, Any] = {"batch_size": rows, **dict.fromkeys(WAYS_TO_MOVE)}
    effective = trainer.effective_batch_size if trainer.effective_batch_size != "auto" else default_rows(trainer)
    if effective is not None:
        update |= {"effective_batch_size": "auto", "gradient_accumulation_steps": max(1, -(-effective // rows))}
    return config.model_copy(update={"trainer": trainer.model_copy(update={**update, "max_batch_size": None})})


def _sharding(world_size: int, offload: Offload) -> Sharding | None:
    """Use FSDP2 where there is more than one GPU, or where layers are brought from the CPU one by one."""
    require_whole("world_size", world_size, most=MOST_GPUS)
    _require_one_of("offload", offload, get_args(Offload))
    is_sharded = world_size > 1 or offload == "weights"
    if not is_sharded and offload == "none":
        return None
    from brim.memory.fsdp import Sharding  # here, since most predictions are for one GPU

    return Sharding(world_size=world_size, kind="fsdp2" if is_sharded else "whole", offload=offload)


def _device(name: str | None, memory_bytes: int | None) -> tuple[Device, bool]:
    """Return the device, and whether its memory is a limit."""
    if name is not None and memory_bytes is not None:
        raise InputError(
            what="both a device and its memory are given", fix="give one: the catalogue has the device's memory"
        )
    if name is not None:
        return find_device(name), True
    if memory_bytes is not None:
        require_whole("memory_bytes", memory_bytes, most=MOST_MEMORY_BYTES)
        return device_of(memory_bytes), True
    if torch.cuda.is_available():
        return device_at_hand(torch.device("cuda", torch.cuda.current_device())), True
    return find_device("a100-80gb"), False


def _shape(asked: Asked, batch_size: int | None, sequence_length: int | None) -> tuple[int, int, tuple[str, ...]]:
    """Return rows, tokens and the choices of those that were open."""
    choices: list[str] = []
    trainer = asked.config.trainer
    trains = isinstance(trainer, FinetuneTrainer) and asked.phase in ("train", "load")
    if batch_size is None:
        # A model that is trained generates as many rows at once as it evaluates.
        of_evaluation = asked.phase == "evaluate" or (isinstance(trainer, FinetuneTrainer) and not trains)
        key = "eval_batch_size" if of_evaluation else "batch_size"
        given = trainer.eval_batch_size if of_evaluation else trainer.batch_size
        is_open = given in ("auto", None)
        batch_size = 1 if is_open else int(given or 1)
        plan = _BY_LENGTH if isinstance(trainer, FinetuneTrainer) else _TOGETHER
        choices.append(f"batch size: {batch_size} (trainer.{key}{plan if is_open else ''})")
    if sequence_length is None:
        sequence_length, reason = _sequence_length(asked)
        choices.append(f"sequence length: {sequence_length:,} ({reason})")
    require_whole("batch_size", batch_size, most=MOST_ROWS)
    require_whole("sequence_length", sequence_length, least=LEAST_TOKENS, most=MOST_TOKENS // batch_size)
    require_in_context(asked, sequence_length)
    return batch_size, sequence_length, tuple(choices)


_BY_LENGTH = ": auto, the smallest micro-batch; `brim plan` shows the micro-batches of a run"


_TOGETHER = ": auto, the smallest batch; `brim predict --plan` shows how many rows go together"


_UNSET_LENGTH_TOKENS = 2048  # a common training length; the context of recent models is far longer than their rows


def _sequence_length(asked: Asked) -> tuple[int, str]:
    context = asked.folder.context_length
    limit = asked.config.preprocessing.global_max_sequence_length
    new = _new_tokens(asked)
    if limit is not None and (context is None or limit + new <= context):
        return limit, "preprocessing.global_max_sequence_length"
    if context is not None and context - new <= _UNSET_LENGTH_TOKENS:
        less = f" less generation.max_new_tokens, {new:,}" if new else ""
        return max(context - new, LEAST_TOKENS), f"the model's context{less}"
    return _UNSET_LENGTH_TOKENS, "the rows' lengths are not known; set sequence_length to that of the longest"


def _new_tokens(asked: Asked) -> int:
    """Return how many tokens follow the prompts; none unless the phase is generate."""
    return (asked.config.generation.max_new_tokens or 0) if asked.phase == "generate" else 0


def require_in_context(asked: Asked, sequence_length: int) -> None:
    """Raise InputError where so many tokens, and the new ones that follow them, exceed the model's context."""
    context = asked.folder.context_length
    new = _new_tokens(asked)
    if context is None or sequence_length + new <= context:
        return
    what = f"sequence_length is {sequence_length:,}" + (f", and {new:,} new tokens follow" if new else "")
    raise InputError(
        what=f"{what}, but the model's context is {context:,} tokens",
        where=asked.folder.name,
        expected=f"at most {context - new:,}",
        fix="ask for shorter rows" + (", or set generation.max_new_tokens lower" if new else ""),
    )


def require_whole(name: str, value: int, *, least: int = 1, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        is_long = isinstance(value, int) and abs(value) >= 10**30
        shown = "a number of too many digits" if is_long else repr(value)
        raise InputError(what=f"{name} is {shown}", expected=f"a whole number from {least:,} to {most:,}")


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        expected = f"one of {', '.join(known)}"
        raise InputError(what=f"{name} is {value!r}", expected=expected, fix="choose one of them")


def question(
    asked: Asked,
    *,
    batch_size: int | None,
    sequence_length: int | None,
    world_size: int,
    offload: Offload | None,
    allocator: str | None = None,
) -> Question:
    """Prepare what `answer` takes; arguments and errors are those of `predict_memory`."""
    if offload is None:
        offload = asked.config.memory.offload if asked.phase in ("train", "load") else "none"
    sharding = _sharding(world_size, offload)
    rows, tokens, choices = _shape(asked, batch_size, sequence_length)
    found = AllocatorSettings.from_environment(os.environ) if allocator is None else AllocatorSettings.parse(allocator)
    job = Job(rows=rows, tokens=tokens, sharding=sharding, allocator=found)
    return Question(asked=asked, traces=Traces(job), choices=(*choices, *_sharding_choices(sharding)))


def check(question: Question) -> None:
    """Build the model without weights, as a trace does first. Raises ModelError and ConfigError."""
    with tracing(question.asked.folder):
        question.traces.build(question.asked)


def answer(question: Question, *, shows_other: bool = True) -> MemoryPrediction:
    """Predict the run that `brim train` would start: where gradient checkpointing is auto, with what it would choose.

    Where no device is known, that is what it would choose if memory were short: whichever takes less.

    shows_other: predict the other choice, too. Raises UntraceableError, and what `check` does.
    """
    asked, choices, trainer = question.asked, question.choices, question.asked.config.trainer
    is_open = isinstance(trainer, FinetuneTrainer) and trainer.enable_gradient_checkpointing == "auto"
    with tracing(asked.folder):
        if asked.phase != "train" or not is_open:
            return question.traces.predict(asked, choices=choices)
        off, on = (replace(asked, config=with_checkpointing(asked.config, is_on)) for is_on in (False, True))
        without = question.traces.predict(off, choices=choices)
        fits = asked.has_limit and without.reserved_bytes <= _reservable_bytes(asked, without)
        # What stays after a step, weights and optimizer state, may be too much even with checkpointing.
        stays_bytes = without.end_allocated_bytes + without.outside_bytes
        if not shows_other and asked.has_limit and (fits or stays_bytes > asked.device.memory_bytes):
            return without
        try:
            with_it = question.traces.predict(on, choices=choices)
        except ValueError:  # which transformers raises for an architecture that has none
            return replace(without, choices=(*without.choices, _NO_CHECKPOINTING))
        room_bytes = _reservable_bytes(asked, with_it)
        if asked.has_limit and not fits and with_it.reserved_bytes <= room_bytes:
            for some in _of_some_layers(question, without, with_it, room_bytes):
                with_it = some
    is_taken = not fits if asked.has_limit else with_it.total_bytes < without.total_bytes
    taken, other = (with_it, without) if is_taken else (without, with_it)
    return replace(taken, other=other, choices=(*taken.choices, _why_checkpointed(asked, taken, other)))


def _of_some_layers(
    question: Question, without: MemoryPrediction, with_it: MemoryPrediction, room_bytes: int
) -> Iterator[MemoryPrediction]:
    """Yield predictions with fewer layers recomputed than all that still fit, the fewest last.

    The first number follows from the line between none and all, the second from that between none and the first.
    """
    asked, found = question.asked, with_it
    layers = asked.architecture.get_text_config().num_hidden_layers
    for _ in range(2):
        saved_bytes = max(without.reserved_bytes - found.reserved_bytes, 1)
        number = max(-(-layers * (without.reserved_bytes - room_bytes) // saved_bytes), 2)
        if number >= layers:
            return
        try:
            some = replace(asked, config=with_checkpointing(asked.config, number))
            found = question.traces.predict(some, choices=question.choices)
        except ConfigError:  # layers that cannot be told from each other
            return
        if found.reserved_bytes > room_bytes:
            return
        layers = number
        yield found


def with_checkpointing(config: Config, layers: int) -> Config:
    """Return the configuration with gradient checkpointing of all layers (True), of none, or of so many."""
    trainer = config.trainer.model_copy(update={"enable_gradient_checkpointing": layers})
    return config.model_copy(update={"trainer": trainer})


def _reservable_bytes(asked: Asked, prediction: MemoryPrediction) -> int:
    """Return what a plan lets PyTorch reserve on the device."""
    device = replace(asked.device, outside_bytes=prediction.outside_bytes)
    try:
        return budget_of(asked.config.memory, device, is_at_hand=False).reserved_bytes
    except ConfigError:  # nothing is left, or memory.budget is more than this device has
        return device.budget_bytes - device.budget_bytes // 100


_NO_CHECKPOINTING = "gradient checkpointing: off (this architecture has none)"


def _why_checkpointed(asked: Asked, taken: MemoryPrediction, other: MemoryPrediction) -> str:
    there, key = format_bytes(other.total_bytes), "trainer.enable_gradient_checkpointing: auto"
    number = taken.gradient_checkpointing
    is_on = "on" if number is True else f"of the first {number} layers" if number else "off"
    if taken.gradient_checkpointing and not asked.has_limit:
        why = f"no device is named; without it, which is faster and chosen where it fits, {there} are needed"
    elif taken.gradient_checkpointing:
        why = f"without it {there} are needed"
    else:
        why = "it fits without" if asked.has_limit else f"with it {there} are needed, which is not less"
    return f"gradient checkpointing: {is_on} ({key}; {why})"


def _sharding_choices(sharding: Sharding | None) -> tuple[str, ...]:
    choices: list[str] = []
    if sharding is None:
        return ()
    if sharding.world_size > 1:
        how = "FSDP2 shards weights, gradients and optimizer state; each decoder layer is gathered when it computes"
        choices.append(f"sharding: over {sharding.world_size} GPUs ({how})")
    if sharding.offload == "optimizer":
        choices.append("offload: optimizer (its state is kept and its step runs on the CPU)")
    if sharding.offload == "weights":
        choices.append("offload: weights (gradients and optimizer, too, are on the CPU; layers are copied to compute)")
    return tuple(choices)
