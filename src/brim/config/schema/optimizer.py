"""Declare `trainer.optimizer`: the update rule, with the keys of torch.optim or else of bitsandbytes.

Update rules with 8-bit or paged states come from bitsandbytes.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Strict

from brim.config.schema.base import NonNegativeFloat, NonNegativeInt, Section, Typed, key

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


Betas: TypeAlias = Annotated[tuple[Beta, Beta], Strict(False)]


PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]


_BETAS = "How slowly the running averages of the gradient and of its square forget."


_TWO_BETAS = "two numbers from 0 to below 1, such as [0.9, 0.999]"


_EPS_TEXT = "Added to the denominator."


_AMSGRAD = "Use the AMSGrad variant."


_TYPE = "The optimizer. `optimizer: adam` is short for `{type: adam}`."


class AdamConfig(Section):
    """Adam; its weight decay is an L2 penalty added to the gradient."""

    type: Literal["adam"] = key("adam", _TYPE)
    betas: Betas = key((0.9, 0.999), _BETAS, expected=_TWO_BETAS)
    eps: NonNegativeFloat = key(1e-8, _EPS_TEXT)
    weight_decay: NonNegativeFloat = key(0.0, "L2 penalty, added to the gradient.")
    amsgrad: bool = key(False, _AMSGRAD)


class AdamWConfig(Section):
    """AdamW: Adam with decoupled weight decay."""

    type: Literal["adamw"] = key("adamw", _TYPE)
    betas: Betas = key((0.9, 0.999), _BETAS, expected=_TWO_BETAS)
    eps: NonNegativeFloat = key(1e-8, _EPS_TEXT)
    weight_decay: NonNegativeFloat = key(
        0.0,
        "Share of each weight, times the learning rate, taken off at every step. torch's default is 0.01.",
    )
    amsgrad: bool = key(False, _AMSGRAD)


class SGDConfig(Section):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = key("sgd", _TYPE)
    momentum: NonNegativeFloat = key(0.0, "How much of the previous update is kept.")
    weight_decay: NonNegativeFloat = key(0.0, "L2 penalty, added to the gradient.")
    dampening: NonNegativeFloat = key(0.0, "How much of the new gradient is left out of the momentum.")
    nesterov: bool = key(False, "Look ahead along the momentum; needs momentum above 0 and no dampening.")


class AdafactorConfig(Section):
    """Adafactor as in torch.optim; its keys are torch's, Ludwig's are those of transformers' class."""

    type: Literal["adafactor"] = key("adafactor", _TYPE)
    beta2_decay: Annotated[float, Field(le=0)] = key(
        -0.8, "Exponent by which the average of squared gradients forgets less over time.", brim=True
    )
    eps: Annotated[tuple[PositiveFloat | None, PositiveFloat], Strict(False)] = key(
        (None, 1e-3),
        "Floors of the squared gradient and of the parameter scale. null: the data type's smallest step.",
        expected="two numbers above 0, the first of which may be null, such as [null, 0.001]",
    )
    d: Annotated[float, Field(ge=1)] = key(1.0, "An update's root mean square is clipped to this.", brim=True)
    weight_decay: NonNegativeFloat = key(0.0, "Share of each weight, times the learning rate, taken off at every step.")


_Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


_Betas: TypeAlias = Annotated[tuple[_Beta, _Beta], Strict(False)]


_Momentum: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


_PLAIN_TYPE = "The optimizer."


_ADAM_BETAS = key(
    (0.9, 0.999), "How slowly the running averages of the gradient and of its square forget.", expected=_TWO_BETAS
)


_LION_BETAS = key((0.9, 0.99), "How slowly the direction and its running average forget.", expected=_TWO_BETAS)


_EPS_KEY = key(1e-8, "Added to the denominator.")


_DECOUPLED = key(0.0, "Share of each weight, times the learning rate, taken off at every step.")


_DECOUPLED_IN_ADAM = key(
    0.0, "Share of each weight, times the learning rate, taken off at every step, as in AdamW; torch's Adam differs."
)


_PENALTY = key(0.0, "L2 penalty, added to the gradient.")


_NO_AMSGRAD = key(False, "Only `false`: bitsandbytes has no AMSGrad variant.")


_MIN_8BIT_SIZE = key(
    4096,
    "Weights with fewer elements keep 32-bit states, which many of an adapter's matrices then do.",
    brim=True,
)


class LionConfig(Section):
    """Lion: the sign of a running average of the gradient."""

    type: Literal["lion"] = key("lion", _PLAIN_TYPE)
    betas: _Betas = _LION_BETAS
    weight_decay: NonNegativeFloat = _DECOUPLED


class Adam8bitConfig(Section):
    """Adam with 8-bit states: a quarter of the memory, in blocks of 256 values with a scale each."""

    type: Literal["adam_8bit"] = key("adam_8bit", _PLAIN_TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS_KEY
    weight_decay: NonNegativeFloat = _DECOUPLED_IN_ADAM
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class AdamW8bitConfig(Section):
    """AdamW with 8-bit states."""

    type: Literal["adamw_8bit"] = key("adamw_8bit", _PLAIN_TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS_KEY
    weight_decay: NonNegativeFloat = _DECOUPLED
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class Lion8bitConfig(Section):
    """Lion with an 8-bit state."""

    type: Literal["lion_8bit"] = key("lion_8bit", _PLAIN_TYPE)
    betas: _Betas = _LION_BETAS
    weight_decay: NonNegativeFloat = _DECOUPLED
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class SGD8bitConfig(Section):
    """Stochastic gradient descent with an 8-bit momentum."""

    type: Literal["sgd_8bit"] = key("sgd_8bit", _PLAIN_TYPE)
    momentum: _Momentum = key(
        0.9, "How much of the previous update is kept. Ludwig's default is 0, which bitsandbytes does not have."
    )
    weight_decay: NonNegativeFloat = _PENALTY
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class RMSprop8bitConfig(Section):
    """RMSprop with an 8-bit state."""

    type: Literal["rmsprop_8bit"] = key("rmsprop_8bit", _PLAIN_TYPE)
    alpha: _Momentum = key(0.99, "How slowly the running average of the squared gradient forgets.")
    eps: NonNegativeFloat = _EPS_KEY
    weight_decay: NonNegativeFloat = _PENALTY
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class Adagrad8bitConfig(Section):
    """Adagrad with an 8-bit state."""

    type: Literal["adagrad_8bit"] = key("adagrad_8bit", _PLAIN_TYPE)
    eps: NonNegativeFloat = key(1e-10, "Added to the denominator.")
    weight_decay: NonNegativeFloat = _PENALTY
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class PagedAdamConfig(Section):
    """Adam with 32-bit states in pages that move to the machine's memory when the GPU's runs out. Needs CUDA."""

    type: Literal["paged_adam"] = key("paged_adam", _PLAIN_TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS_KEY
    weight_decay: NonNegativeFloat = _DECOUPLED_IN_ADAM
    amsgrad: Literal[False] = _NO_AMSGRAD


class PagedAdamWConfig(Section):
    """AdamW with paged 32-bit states. Needs CUDA."""

    type: Literal["paged_adamw"] = key("paged_adamw", _PLAIN_TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS_KEY
    weight_decay: NonNegativeFloat = _DECOUPLED
    amsgrad: Literal[False] = _NO_AMSGRAD


class PagedLionConfig(Section):
    """Lion with a paged 32-bit state. Needs CUDA."""

    type: Literal["paged_lion"] = key("paged_lion", _PLAIN_TYPE)
    betas: _Betas = _LION_BETAS
    weight_decay: NonNegativeFloat = _DECOUPLED


class PagedAdam8bitConfig(Section):
    """Adam with paged 8-bit states. Needs CUDA."""

    type: Literal["paged_adam_8bit"] = key("paged_adam_8bit", _PLAIN_TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS_KEY
    weight_decay: NonNegativeFloat = _DECOUPLED_IN_ADAM
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class PagedAdamW8bitConfig(Section):
    """AdamW with paged 8-bit states. Needs CUDA."""

    type: Literal["paged_adamw_8bit"] = key("paged_adamw_8bit", _PLAIN_TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS_KEY
    weight_decay: NonNegativeFloat = _DECOUPLED
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class PagedLion8bitConfig(Section):
    """Lion with a paged 8-bit state. Needs CUDA."""

    type: Literal["paged_lion_8bit"] = key("paged_lion_8bit", _PLAIN_TYPE)
    betas: _Betas = _LION_BETAS
    weight_decay: NonNegativeFloat = _DECOUPLED
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


BitsandbytesOptimizerConfig: TypeAlias = (
    LionConfig
    | Adam8bitConfig
    | AdamW8bitConfig
    | Lion8bitConfig
    | SGD8bitConfig
    | RMSprop8bitConfig
    | Adagrad8bitConfig
    | PagedAdamConfig
    | PagedAdamWConfig
    | PagedLionConfig
    | PagedAdam8bitConfig
    | PagedAdamW8bitConfig
    | PagedLion8bitConfig
)


OptimizerConfig: TypeAlias = AdamConfig | AdamWConfig | SGDConfig | AdafactorConfig | BitsandbytesOptimizerConfig


OptimizerField: TypeAlias = Annotated[
    Annotated[OptimizerConfig, Field(discriminator="type")],
    Typed(
        "adam",
        "adamw",
        "sgd",
        "adafactor",
        "lion",
        "adam_8bit",
        "adamw_8bit",
        "lion_8bit",
        "sgd_8bit",
        "rmsprop_8bit",
        "adagrad_8bit",
        "paged_adam",
        "paged_adamw",
        "paged_lion",
        "paged_adam_8bit",
        "paged_adamw_8bit",
        "paged_lion_8bit",
        default="adam",
    ),
]
