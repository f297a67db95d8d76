"""`trainer.optimizer`: the update rule. Keys are those of torch.optim, and for the rest those of bitsandbytes."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Strict

from brim.config.schema.base import NonNegativeFloat, Section, Typed, key
from brim.config.schema.bitsandbytes_optimizer import BitsandbytesOptimizerConfig

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Betas: TypeAlias = Annotated[tuple[Beta, Beta], Strict(False)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]

_BETAS = "How slowly the running averages of the gradient and of its square forget."
_TWO_BETAS = "two numbers from 0 to below 1, such as [0.9, 0.999]"
_EPS = "Added to the denominator."
_AMSGRAD = "Use the AMSGrad variant."
_TYPE = "The optimizer. `optimizer: adam` is short for `{type: adam}`."


class AdamConfig(Section):
    """Adam; its weight decay is an L2 penalty added to the gradient."""

    type: Literal["adam"] = key("adam", _TYPE)
    betas: Betas = key((0.9, 0.999), _BETAS, expected=_TWO_BETAS)
    eps: NonNegativeFloat = key(1e-8, _EPS)
    weight_decay: NonNegativeFloat = key(0.0, "L2 penalty, added to the gradient.")
    amsgrad: bool = key(False, _AMSGRAD)


class AdamWConfig(Section):
    """AdamW: Adam with decoupled weight decay."""

    type: Literal["adamw"] = key("adamw", _TYPE)
    betas: Betas = key((0.9, 0.999), _BETAS, expected=_TWO_BETAS)
    eps: NonNegativeFloat = key(1e-8, _EPS)
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
