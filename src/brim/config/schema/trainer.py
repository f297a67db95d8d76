"""Declare `trainer`: whether and how the model is trained.

It holds `gradient_clipping`, the bounds on the gradient before an update; `learning_rate_scheduler`, the learning
rate over the run; and the keys that move the batch while training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainSerializer, WithJsonSchema, create_model

from brim.config.schema.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Short,
    Text,
    key,
    required,
)
from brim.config.schema.optimizer import AdamConfig, OptimizerField

LearningRateValue: TypeAlias = Annotated[float, Field(ge=0, le=1)]


EarlyStop: TypeAlias = Annotated[int, Field(ge=-1)]


Metric: TypeAlias = Literal["loss", "perplexity", "token_accuracy", "sequence_accuracy"]


# From 2 on, since Python takes 1 for true: no comparison could tell one layer from all of them.
Checkpointing: TypeAlias = bool | Annotated[int, Field(ge=2)] | Literal["auto"]


RowsAtOnce: TypeAlias = PositiveInt | Literal["auto"] | None


_NO_EFFECT = "No effect with `type: none`; checked, as in Ludwig."


_TYPE = "`finetune` trains. `none` (the default, as in Ludwig) uses the base model as it is."


_CHUNKED_LOSS = (
    "Compute logits and loss for some supervised tokens at a time, so that the logits of a whole batch never stand in "
    "memory. `auto`: wherever the architecture allows it, since it costs no time. `false`: all logits at once."
)


_PACKING = (
    "Put the rows of a micro-batch behind one another, as one sequence without padding, in which each row sees itself "
    "alone: loss and gradient are those of padded rows. `auto`: on a GPU in 16 bits, where the architecture passes a "
    "trial; on a CPU, too, where a training of 10 s or more is estimated to gain. `true`: wherever it passes. In "
    "Ludwig and other tools packed rows see each other, or a step's rows become others; here neither."
)


_BATCH_SIZE = (
    "Micro-batch: rows of one forward and backward pass on one device. `auto`: each effective batch is partitioned by "
    "its rows' lengths, so that no micro-batch exceeds the memory and the step takes the least time; `brim plan` shows "
    "it. A number fixes the rows. Ludwig's default is 1, and its `auto` lets the memory decide the effective batch, "
    "too: here `use_maximum_batch_size` does."
)


_MAXIMUM = (
    "`true`: the largest micro-batches that fit, instead of the fastest. Where no key says how many rows make an "
    "update, an update is of as many of the longest rows as fit together: the memory then decides what is learned, and "
    "another card learns otherwise."
)


_BATCH_SEARCH = (
    "How the largest micro-batch is found. `predict`: predicted, then tried once. The others try sizes: `linear` two "
    "small ones, from which it predicts; `binary`, `doubling` and `halving` until memory runs out."
)


_CHECKPOINTING = (
    "Recompute activations in the backward pass instead of keeping them: less memory, about a third slower. `auto`: "
    "off where the run fits and is faster so; else of as few decoder layers as make it fastest. A number: of so many "
    "layers, the first ones, 2 at least."
)


_DROPOUT_BY_ROW = (
    "Draw the adapter's dropout for each row from `random_seed`, the step and the row's number, so that the same is "
    "dropped however a batch is partitioned. `false`: as PyTorch draws it, at the same rate but with other numbers for "
    "another partition. "
    "Dropout of the base model's own, where it has any, stays PyTorch's."
)


_EVAL_BATCH_SIZE = (
    "Rows that are evaluated at once. `auto`: partitioned by their lengths, so that no batch exceeds the memory and "
    "all take the least time. A number fixes the rows. null: as `auto`. Ludwig's default is 2."
)


_ROWS_GENERATED_FOR = (
    "Rows that are generated for at once. `auto`: as many as fit with all their new tokens. A number fixes the rows. "
    "Ludwig's default is 1."
)


_RAMPUP = (
    "Lead the effective batch from a smaller one to `effective_batch_size`. `batch_rampup: 0.1dur` is short for "
    "`{length: 0.1dur}`. At most one of `batch_rampup`, `batch_schedule`, `batch_increase_function` and "
    "`batch_adaptation`."
)


_STEPS = (
    "The effective batch in steps, up or down: `0sp:1024 250000sp:2048 1e6sp:4096` are 1,024 rows at first, 2,048 "
    "once 250,000 samples have been consumed, and so on. Samples (`sp`), real tokens (`tok`), epochs (`ep`), shares of "
    "the run (`dur`) or batches of the last size (`ba`), one unit in a table."
)


_INCREASE = (
    "A Python function that is called before each epoch, with the number of epochs done and the present effective "
    "batch, and returns how many rows to add; negative: to take away. An increase beyond the rows that fit together is "
    "not followed. `module:function`; from Python, the function itself. All calls come before training. It runs code, "
    "so only for files that you trust."
)


_ADAPTATION = (
    "Let the effective batch follow the measured noise scale of the gradient, within bounds. Training begins with "
    "`effective_batch_size`; `auto` is `min`."
)


_LR_SCALING = (
    "The learning rate at other sizes than the final one: multiplied by the share of it (`linear`), by that share's "
    "square root (`sqrt`), or the same (`none`). With `batch_adaptation`, relative to `effective_batch_size`."
)


_BETA2_SCALING = (
    "Raise Adam's second beta to the power of (batch / final batch), so that it forgets as fast in samples at every "
    "size. `auto`: where the batch moves and `batch_lr_scaling` is `sqrt`, and the optimizer is an Adam."
)


_NOISE_SCALE = (
    "Updates between measurements of the gradient's noise scale, which metrics.jsonl then has. null: none; 10 with "
    "`batch_adaptation`."
)


_EARLY_STOP = "-1 (off), or a whole number of at least 1"


class NoTrainer(Section):
    """The base model is not trained: it is evaluated, and predicts, as it is."""

    type: Literal["none"] = key("none", _TYPE)
    batch_size: PositiveInt | Literal["auto"] = key("auto", _ROWS_GENERATED_FOR)
    eval_batch_size: RowsAtOnce = key("auto", _EVAL_BATCH_SIZE)
    learning_rate: LearningRateValue | Literal["auto"] = key(0.0002, _NO_EFFECT)
    epochs: PositiveInt = key(3, _NO_EFFECT)
    train_steps: PositiveInt | None = key(None, _NO_EFFECT)
    early_stop: EarlyStop = key(-1, _NO_EFFECT, expected=_EARLY_STOP)
    steps_per_checkpoint: NonNegativeInt = key(0, _NO_EFFECT)
    checkpoints_per_epoch: NonNegativeInt = key(0, _NO_EFFECT)
    validation_field: Text | None = key(None, _NO_EFFECT)
    validation_metric: Metric | None = key(None, _NO_EFFECT)
    chunked_loss: bool | Literal["auto"] = key("auto", _CHUNKED_LOSS, brim=True)
    packing: bool | Literal["auto"] = key("auto", _PACKING)
    skip_all_evaluation: bool = key(False, "Do not evaluate on the splits.")
    evaluate_training_set: bool = key(False, "Evaluate on the training split, too.")


Bound: TypeAlias = Annotated[float, Field(gt=0)]


class GradientClippingConfig(Section):
    """The gradient is clipped before an update; each bound is off when null."""

    clipglobalnorm: Bound | None = key(0.5, "Largest norm of all gradients together.")
    clipnorm: Bound | None = key(None, "Also a bound on the norm of all gradients, as in Ludwig's code.")
    clipvalue: Bound | None = key(None, "Largest absolute value of any one gradient.")


DURATION = "a duration: a number with ba, ep, sp, tok or dur, such as 0.1dur or 5000sp"
_DURATION_OR_NULL = f"{DURATION}, or null"


class LearningRateScheduler(Section):
    """The learning rate rises, then decays. It runs on samples, so a change of the batch size does not bend it."""

    decay: Literal["constant", "linear", "cosine", "wsd"] | None = key(
        None,
        "How the rate falls after the warm-up: linearly or along a cosine down to `eta_min`; `wsd` stays up and falls "
        "linearly at the end; null and `constant` stay up.",
    )
    warmup_fraction: Fraction = key(0.0, "Share of the run in which the rate rises from 0.")
    warmup_length: Text | None = key(
        None,
        "The warm-up as a duration, instead of `warmup_fraction`: `500ba` (batches of the final size), `2ep`, "
        "`5000sp`, `1e6tok` or `0.1dur`.",
        brim=True,
        expected=_DURATION_OR_NULL,
    )
    eta_min: NonNegativeFloat = key(0.0, "The rate at which a decay ends; an absolute learning rate.")
    decay_fraction: Fraction = key(
        0.1, "Share of the run in which `wsd` falls. Ludwig's `wsd_decay_fraction` is accepted too.", brim=True
    )
    decay_length: Text | None = key(
        None, "The fall of `wsd` as a duration, instead of `decay_fraction`.", brim=True, expected=_DURATION_OR_NULL
    )


_LENGTH = (
    "How long the ramp takes: `0.1dur` of the whole run, `2ep` epochs, `5000sp` samples (rows), `1e6tok` real tokens, "
    "or `500ba` batches of the final size."
)


_FROM = (
    "Rows of the first updates. null: `trainer.initial_effective_batch_size`, and where that is not given a quarter of "
    "the final batch. Above the final batch, the ramp leads downwards."
)


if TYPE_CHECKING:
    _Ramp = Section
else:
    # `from` is a word of Python's own, which no class body can name a field.
    _Ramp = create_model(
        "_Ramp",
        __base__=Section,
        length=(Text, required(_LENGTH, brim=True, expected=DURATION)),
        **{"from": (PositiveInt | None, key(None, _FROM, brim=True))},
    )


class RampupConfig(_Ramp):
    """The effective batch is led from a first size to `trainer.effective_batch_size`, which then holds to the end."""

    if TYPE_CHECKING:
        length: str

    shape: Literal["doubling", "linear", "equal_steps"] = key(
        "doubling",
        "`doubling`: twice the rows at each stage, the stages share the samples of the ramp equally. `equal_steps`: "
        "the same stages, each with equally many updates. `linear`: `increment` rows more at each of equal parts, as "
        "in Megatron-LM.",
        brim=True,
    )
    increment: PositiveInt | None = key(None, "Rows that each stage of a `linear` ramp adds. null: 1.", brim=True)

    @property
    def initial(self) -> int | None:
        """Return the value of `from`."""
        rows: int | None = getattr(self, "from")
        return rows


class NoiseScaleAdaptation(Section):
    """The batch follows the measured gradient noise scale: in steps of a factor 2, within bounds."""

    type: Literal["noise_scale"] = key("noise_scale", "What the batch follows.", brim=True)
    min: PositiveInt = required("The fewest rows of an update, at least 2: one row shows no noise.", brim=True)
    max: PositiveInt = required("The most rows of an update.", brim=True)


def _function_name(function: str | Callable[..., Any] | None) -> str | None:
    """Write a function as it stands in a file: `module:name`."""
    if function is None or isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


IncreaseFunction: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1)] | Annotated[Callable[..., Any], WithJsonSchema({"type": "string"})] | None,
    PlainSerializer(_function_name, return_type=str | None, when_used="json"),
]


class FinetuneTrainer(Section):
    """The model is fine-tuned, or trained from scratch (`initialize: random`). A step is one update of the weights."""

    type: Literal["finetune"] = key("finetune", _TYPE)
    batch_size: PositiveInt | Literal["auto"] = key("auto", _BATCH_SIZE)
    use_maximum_batch_size: bool = key(False, _MAXIMUM, brim=True)
    batch_search: Literal["predict", "linear", "binary", "doubling", "halving"] = key(
        "predict", _BATCH_SEARCH, brim=True
    )
    gradient_accumulation_steps: PositiveInt | Literal["auto"] = key(
        "auto",
        "Micro-batches whose gradients make one update. `auto`: effective_batch_size / batch_size; where batch_size is "
        "`auto`, as many as the rows' lengths ask for, which differs from step to step.",
    )
    effective_batch_size: PositiveInt | Literal["auto"] = key(
        "auto",
        "Rows of one update: what decides what is learned. batch_size × gradient_accumulation_steps × processes, "
        "exactly, where those are given. `auto`: that product; with neither, 16, or all training rows where there are "
        "fewer (Ludwig: 1); with `use_maximum_batch_size` and neither, as many of the longest rows as fit together.",
    )
    max_batch_size: PositiveInt | None = key(
        None,
        "Largest effective batch that is allowed, and so the largest micro-batch that is tried. null: no limit (Ludwig "
        "writes 2^40).",
    )
    initial_effective_batch_size: PositiveInt | None = key(
        None, "Rows of the first updates of a `batch_rampup`. null: a quarter of `effective_batch_size`.", brim=True
    )
    batch_rampup: Annotated[RampupConfig | None, Short("length")] = key(
        None, _RAMPUP, brim=True, expected=f"{DURATION}, a mapping with length, or null"
    )
    batch_schedule: Text | None = key(
        None, _STEPS, brim=True, expected="steps such as 0sp:1024 250000sp:2048 1e6sp:4096, or null"
    )
    batch_increase_function: IncreaseFunction = key(
        None, _INCREASE, brim=True, expected="module:function such as mymodule:increase, or null"
    )
    batch_adaptation: NoiseScaleAdaptation | None = key(
        None, _ADAPTATION, brim=True, expected="a mapping such as {type: noise_scale, min: 32, max: 1024}, or null"
    )
    batch_lr_scaling: Literal["none", "sqrt", "linear"] = key("none", _LR_SCALING, brim=True)
    batch_beta2_scaling: bool | Literal["auto"] = key("auto", _BETA2_SCALING, brim=True)
    noise_scale_every: PositiveInt | None = key(None, _NOISE_SCALE, brim=True)
    eval_batch_size: RowsAtOnce = key("auto", _EVAL_BATCH_SIZE)
    epochs: PositiveInt = key(3, "Passes over the training rows. Ludwig's default is 100.")
    train_steps: PositiveInt | None = key(
        None, "Updates after which training ends, instead of `epochs`. Counts updates; Ludwig counts micro-batches."
    )
    train_samples: PositiveInt | None = key(
        None, "Rows after which training ends, instead of `epochs`; rows of a second epoch count again.", brim=True
    )
    learning_rate: LearningRateValue | Literal["auto"] = key(
        0.001, "The highest learning rate. `auto`: 0.0001 with LoRA, 0.00001 for all weights, 0.001 from scratch."
    )
    learning_rate_scheduler: LearningRateScheduler = key(LearningRateScheduler(), "The learning rate over the run.")
    learning_rate_scaling: Literal["constant", "sqrt", "linear"] = key(
        "linear", "How the learning rate grows with the number of processes."
    )
    optimizer: OptimizerField = key(AdamConfig(), "The update rule.")
    gradient_clipping: GradientClippingConfig | None = key(
        GradientClippingConfig(), "Bounds on the gradient. null: none."
    )
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "What follows a loss or gradient that is NaN or infinite. `stop`: the run ends before the update and names the "
        "rows. `skip`: the update is left out, and named in metrics.jsonl; ten in a row end the run.",
        brim=True,
    )
    early_stop: EarlyStop = key(
        5,
        "Evaluations in a row without a better `validation_metric` after which training ends. -1: never.",
        expected=_EARLY_STOP,
    )
    steps_per_checkpoint: NonNegativeInt = key(
        0, "Updates between checkpoints. The model is evaluated at each checkpoint. 0: once an epoch."
    )
    checkpoints_per_epoch: NonNegativeInt = key(0, "Checkpoints in each epoch, evenly spread. 0: one, at its end.")
    validation_field: Text | None = key(
        None, "The feature that decides which checkpoint is best: the output feature's name or `combined`."
    )
    validation_metric: Metric | None = key(None, "The metric that decides which checkpoint is best. null: `loss`.")
    enable_gradient_checkpointing: Checkpointing = key("auto", _CHECKPOINTING)
    chunked_loss: bool | Literal["auto"] = key("auto", _CHUNKED_LOSS, brim=True)
    packing: bool | Literal["auto"] = key("auto", _PACKING)
    dropout_by_row: bool = key(False, _DROPOUT_BY_ROW, brim=True)
    skip_all_evaluation: bool = key(False, "Do not evaluate while training; early stopping is off then.")
    evaluate_training_set: bool = key(False, "Evaluate on the training split, too.")


TrainerConfig: TypeAlias = NoTrainer | FinetuneTrainer


TrainerField: TypeAlias = Annotated[
    Annotated[TrainerConfig, Field(discriminator="type")], Short(types=("none", "finetune"), default="none")
]
