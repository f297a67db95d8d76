"""Replace every `auto`, and every default that depends on others, by a value and a reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from brim.config.batch_rules import ACCUMULATION, BATCH, DEFAULT_ROWS, EFFECTIVE, BatchSizes, batch_sizes, default_rows
from brim.config.findings import Finding
from brim.config.rules import biases_in_16_bits, quantised_base
from brim.config.schedule_rules import has_beta2, implied_effective_rows, moves_batch, takes_default_epochs
from brim.config.schema import Config, FinetuneTrainer
from brim.config.text import KeyPath, dotted
from brim.errors import ConfigError, Problem
from brim.notes import Note

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Describe what choices depend on."""

    kind: Literal["cpu", "cuda", "mps"]
    bf16: bool  # bfloat16 arithmetic in hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Hold one automatic choice: the key, the value, and why."""

    key: str
    value: Any
    reason: str
    overrules: bool = False  # the configuration asks for another value, which cannot be had

    def __str__(self) -> str:
        asked = ", not as configured" if self.overrules else ""
        return f"{self.key}: {self.value}{asked} ({self.reason})"

    def as_note(self) -> Note:
        """Return a note where the configuration asks otherwise, else a detail."""
        return Note(str(self), kind="note" if self.overrules else "detail")

    @staticmethod
    def made_in(config: Config, choices: Iterable[Choice]) -> Config:
        """Return the configuration with these choices made."""
        for choice in choices:
            config = config.having(choice.key, choice.value)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Hold a configuration without `auto`, and what was chosen."""

    config: Config
    choices: tuple[Choice, ...]


def resolve(config: Config, device: DeviceFacts, *, context_length: int | None = None) -> Resolution:
    """Choose what the user has left open. Resolving a resolved configuration changes nothing.

    What depends on more than the device stays `auto`, too: `trainer.chunked_loss` and
    `model_parameters.attn_implementation` wait for the model (models/load.py); `trainer.batch_size` with
    `gradient_accumulation_steps`, `trainer.enable_gradient_checkpointing` and the section `memory` for the plan.

    context_length: tokens that the model reaches; None where it sets no limit.

    Raises ConfigError when the batch sizes do not multiply up; when the precision does not fit an adapter's settings,
    which can come with trained weights; when quantization, which can come with the base model's folder, does not fit
    the rest; or when the device cannot do what the optimizer needs.
    """
    found = [*biases_in_16_bits(config), *quantised_base(config), *_optimizer_on(config, device)]
    ConfigError.raise_for(Problem(what=f.what, where=dotted(f.path), fix=f.fix) for f in found)
    choices: list[Choice] = []
    resolved = config
    for path, value, reason in _decisions(config, device, context_length):
        resolved = resolved.having(dotted(path), value)
        if reason:
            choices.append(Choice(key=dotted(path), value=value, reason=reason))
    return Resolution(config=resolved, choices=tuple(choices))


def bounded_by_rows(config: Config, choices: tuple[Choice, ...], num_rows: int) -> tuple[Config, tuple[Choice, ...]]:
    """Bound the default effective batch by the rows to train on; return the resolved configuration and its choices.

    A batch that was set, or that a schedule names, stays what it is.
    """
    trainer, key = config.trainer, dotted(EFFECTIVE)
    chosen = next((each for each in choices if each.key == key), None)
    if chosen is None or not isinstance(trainer, FinetuneTrainer) or trainer.batch_size != "auto":
        return config, choices
    if moves_batch(trainer) or chosen.value <= num_rows:
        return config, choices
    fewer = Choice(key=key, value=num_rows, reason=f"all rows to train on, since they are fewer; {chosen.reason}")
    return with_effective_rows(config, num_rows), tuple(fewer if each is chosen else each for each in choices)


def with_effective_rows(config: Config, rows: int) -> Config:
    """Return the configuration with updates of so many rows."""
    return config.having(dotted(EFFECTIVE), rows)


def new_tokens(config: Config, context_length: int | None) -> int:
    """Return generation.max_new_tokens as it is set or will be chosen."""
    given = config.generation.max_new_tokens
    return _max_new_tokens(config, context_length)[0] if given is None else given


def _decisions(config: Config, device: DeviceFacts, context_length: int | None) -> Iterator[tuple[KeyPath, Any, str]]:
    """Yield key, value and reason of each decision; an empty reason if there was no choice."""
    if config.precision == "auto":
        yield ("precision",), *_precision(config, device)
    quantization = config.quantization
    if quantization is not None and quantization.bits == 4 and quantization.bnb_4bit_compute_dtype == "auto":
        yield ("quantization", "bnb_4bit_compute_dtype"), *_compute_dtype(config, device)
    if config.adapter is not None and config.adapter.alpha is None:
        yield ("adapter", "alpha"), 2 * config.adapter.r, "twice adapter.r"
    if isinstance(config.trainer, FinetuneTrainer):
        yield from _sizes(config.trainer)
        if config.trainer.learning_rate == "auto":
            yield ("trainer", "learning_rate"), *_automatic_rate(config)
        if config.trainer.batch_beta2_scaling == "auto":
            yield ("trainer", "batch_beta2_scaling"), *_beta2_scaling(config.trainer)
    if config.generation.max_new_tokens is None:
        yield ("generation", "max_new_tokens"), *_max_new_tokens(config, context_length)


def _precision(config: Config, device: DeviceFacts) -> tuple[str, str]:
    if device.kind == "cpu":
        return "fp32", "the device is a CPU"
    if device.bf16:
        if config.adapter is not None and config.adapter.bias_type != "none":
            return "bf16-mixed", "the GPU has bfloat16; the biases that are trained stay in fp32"
        if not isinstance(config.trainer, FinetuneTrainer):
            return "bf16-true", "the GPU has bfloat16, and nothing is trained"
        if config.adapter is not None:
            return "bf16-true", "the GPU has bfloat16; the base is frozen, the adapter stays in fp32"
        return "bf16-mixed", "the GPU has bfloat16; weights stay in fp32, since 16 bits would lose small updates"
    if device.kind == "mps":
        return "fp32", "the device has no bfloat16"
    return "fp16-mixed", "the GPU has no bfloat16"


def _compute_dtype(config: Config, device: DeviceFacts) -> tuple[str, str]:
    """Give 4-bit layers the data type in which the others compute."""
    precision = config.precision if config.precision != "auto" else _precision(config, device)[0]
    names = {"fp32": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
    return names[precision], f"precision is {precision}"


def _optimizer_on(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Refuse paged states without CUDA, whose unified memory holds them; bitsandbytes would silently not page."""
    optimizer = config.trainer.optimizer if isinstance(config.trainer, FinetuneTrainer) else None
    if optimizer is not None and optimizer.type.startswith("paged_") and device.kind != "cuda":
        yield Finding(
            paths=(("trainer", "optimizer", "type"),),
            what=f"trainer.optimizer {optimizer.type} needs a CUDA device, and this is a "
            f"{'CPU' if device.kind == 'cpu' else device.kind} machine",
            fix=f"set trainer.optimizer.type: {optimizer.type.removeprefix('paged_')}",
        )


def _sizes(trainer: FinetuneTrainer) -> Iterator[tuple[KeyPath, Any, str]]:
    sizes = batch_sizes(trainer)
    if isinstance(sizes, Finding):
        raise ConfigError(what=sizes.what, where=dotted(sizes.path), expected=sizes.expected, fix=sizes.fix)
    if sizes.accumulation_steps is not None:
        yield from _fixed_sizes(trainer, sizes)
    if trainer.effective_batch_size == "auto" and sizes.effective_rows is not None:
        yield EFFECTIVE, sizes.effective_rows, _why_effective(trainer, sizes)


def _fixed_sizes(trainer: FinetuneTrainer, sizes: BatchSizes) -> Iterator[tuple[KeyPath, Any, str]]:
    batch, accumulation = trainer.batch_size == "auto", trainer.gradient_accumulation_steps == "auto"
    of_effective = f"effective batch {sizes.effective_rows} / "
    if trainer.effective_batch_size == "auto":
        why_batch = why_accumulation = "no effective batch is set"
    else:
        why_accumulation = f"{of_effective}batch {sizes.micro_batch_rows}"
        of_accumulation = f"{of_effective}accumulation {sizes.accumulation_steps}"
        why_batch = "an update is of one row" if accumulation else of_accumulation
    if batch:
        yield BATCH, sizes.micro_batch_rows, why_batch
    if accumulation:
        yield ACCUMULATION, sizes.accumulation_steps, why_accumulation


def _why_effective(trainer: FinetuneTrainer, sizes: BatchSizes) -> str:
    implied = implied_effective_rows(trainer)
    if implied is not None:
        return implied[1]
    if default_rows(trainer) is not None:
        is_bounded = trainer.max_batch_size is not None and trainer.max_batch_size < DEFAULT_ROWS
        return ("trainer.max_batch_size; " if is_bounded else "") + _defaults(trainer)
    return f"batch {sizes.micro_batch_rows} × accumulation {sizes.accumulation_steps}"


def _defaults(trainer: FinetuneTrainer) -> str:
    """Explain the default batch, and the default epochs if they hold as well."""
    if takes_default_epochs(trainer):
        return f"the defaults are {trainer.epochs} epochs of {DEFAULT_ROWS} rows an update; Ludwig's are 100 and 1"
    return f"the default is {DEFAULT_ROWS} rows an update; Ludwig's is 1"


def _beta2_scaling(trainer: FinetuneTrainer) -> tuple[bool, str]:
    """Decide on the scaling of beta2; the reason is empty if there was nothing to choose."""
    if trainer.batch_lr_scaling != "sqrt" or not moves_batch(trainer):
        return False, ""
    if not has_beta2(trainer.optimizer):
        return False, f"{trainer.optimizer.type} has no second beta as Adam's"
    return True, "batch_lr_scaling is sqrt, and the batch moves"


def _automatic_rate(config: Config) -> tuple[float, str]:
    if config.adapter is not None:
        return 1e-4, "usual with LoRA"
    if config.initialize == "random":
        return 1e-3, "usual from scratch"
    return 1e-5, "usual when all weights of a pretrained model are trained"


def _max_new_tokens(config: Config, context_length: int | None) -> tuple[int, str]:
    """Choose a length that leaves at least half of the context to the prompt."""
    tokens, reason = _length_of_answers(config)
    if context_length is not None and tokens > context_length // 2:
        return context_length // 2, f"half of the model's context; {reason} would leave too little for prompts"
    return tokens, reason


def _length_of_answers(config: Config) -> tuple[int, str]:
    of_output = config.output_features[0].preprocessing.max_sequence_length
    if of_output is not None:
        return of_output, "the output feature's max_sequence_length"
    of_all = config.preprocessing.global_max_sequence_length
    if of_all is not None:
        return of_all, "preprocessing.global_max_sequence_length"
    return DEFAULT_MAX_NEW_TOKENS, "no length is set"
