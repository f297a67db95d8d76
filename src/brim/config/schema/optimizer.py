"""Declare `trainer.optimizer`: the update rule, with the keys of torch.optim or else of bitsandbytes.

Update rules with 8-bit or paged states come from bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

from pydantic import Field, Strict, create_model

from brim.config.schema.base import NonNegativeFloat, NonNegativeInt, Section, Short, key

Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


Betas: TypeAlias = Annotated[tuple[Beta, Beta], Strict(False)]


PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]


_BETAS = "How slowly the running averages of the gradient and of its square forget."


_TWO_BETAS = "two numbers from 0 to below 1, such as [0.9, 0.999]"


_EPS_TEXT = "Added to the denominator."


_TAKEN_OFF = "Share of each weight, times the learning rate, taken off at every step"


_AMSGRAD = "Use the AMSGrad variant."


_TYPE = "The optimizer. `optimizer: adam` is short for `{type: adam}`."


class AdamConfig(Section):
    """Adam adds its weight decay to the gradient, as an L2 penalty."""

    type: Literal["adam"] = key("adam", _TYPE)
    betas: Betas = key((0.9, 0.999), _BETAS, expected=_TWO_BETAS)
    eps: NonNegativeFloat = key(1e-8, _EPS_TEXT)
    weight_decay: NonNegativeFloat = key(0.0, "L2 penalty, added to the gradient.")
    amsgrad: bool = key(False, _AMSGRAD)


class AdamWConfig(Section):
    """AdamW is Adam with decoupled weight decay."""

    type: Literal["adamw"] = key("adamw", _TYPE)
    betas: Betas = key((0.9, 0.999), _BETAS, expected=_TWO_BETAS)
    eps: NonNegativeFloat = key(1e-8, _EPS_TEXT)
    weight_decay: NonNegativeFloat = key(0.0, f"{_TAKEN_OFF}. torch's default is 0.01.")
    amsgrad: bool = key(False, _AMSGRAD)


class SGDConfig(Section):
    """Weights follow stochastic gradient descent."""

    type: Literal["sgd"] = key("sgd", _TYPE)
    momentum: NonNegativeFloat = key(0.0, "How much of the previous update is kept.")
    weight_decay: NonNegativeFloat = key(0.0, "L2 penalty, added to the gradient.")
    dampening: NonNegativeFloat = key(0.0, "How much of the new gradient is left out of the momentum.")
    nesterov: bool = key(False, "Look ahead along the momentum; needs momentum above 0 and no dampening.")


class AdafactorConfig(Section):
    """Adafactor is that of torch.optim, and so are its keys; Ludwig's are those of transformers' class."""

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
    weight_decay: NonNegativeFloat = key(0.0, f"{_TAKEN_OFF}.")


class BitsandbytesOptimizerConfig(Section):
    """Declare what all optimizers of bitsandbytes share; the table below has the keys of each."""

    type: str


_Momentum: TypeAlias = Annotated[float, Field(gt=0, lt=1)]

_Keys: TypeAlias = Mapping[str, tuple[Any, Any]]  # name: its type and its default with help

_DECOUPLED: _Keys = {"weight_decay": (NonNegativeFloat, key(0.0, f"{_TAKEN_OFF}."))}

_PENALTY: _Keys = {"weight_decay": (NonNegativeFloat, key(0.0, "L2 penalty, added to the gradient."))}

_ADAMW: _Keys = {
    "betas": (Betas, key((0.9, 0.999), _BETAS, expected=_TWO_BETAS)),
    "eps": (NonNegativeFloat, key(1e-8, _EPS_TEXT)),
    **_DECOUPLED,
    "amsgrad": (Literal[False], key(False, "Only `false`: bitsandbytes has no AMSGrad variant.")),
}

_ADAM: _Keys = {
    **_ADAMW,
    "weight_decay": (NonNegativeFloat, key(0.0, f"{_TAKEN_OFF}, as in AdamW; torch's Adam differs.")),
}

_LION_BETAS = "How slowly the direction and its running average forget."

_LION: _Keys = {"betas": (Betas, key((0.9, 0.99), _LION_BETAS, expected=_TWO_BETAS)), **_DECOUPLED}

_SMALL = "Weights with fewer elements keep 32-bit states, which many of an adapter's matrices then do."

_EIGHT_BITS: _Keys = {"min_8bit_size": (NonNegativeInt, key(4096, _SMALL, brim=True))}

_KEPT = "How much of the previous update is kept. Ludwig's default is 0, which bitsandbytes does not have."

_SGD: _Keys = {"momentum": (_Momentum, key(0.9, _KEPT)), **_PENALTY}

_RMSPROP: _Keys = {
    "alpha": (_Momentum, key(0.99, "How slowly the running average of the squared gradient forgets.")),
    "eps": (NonNegativeFloat, key(1e-8, _EPS_TEXT)),
    **_PENALTY,
}

_ADAGRAD: _Keys = {"eps": (NonNegativeFloat, key(1e-10, _EPS_TEXT)), **_PENALTY}

# Each optimizer of bitsandbytes: its type, what it is, and its keys.
_BITSANDBYTES: tuple[tuple[str, str, _Keys], ...] = (
    ("lion", "Lion: the sign of a running average of the gradient.", _LION),
    (
        "adam_8bit",
        "Adam with 8-bit states: a quarter of the memory, in blocks of 256 values with a scale each.",
        {**_ADAM, **_EIGHT_BITS},
    ),
    ("adamw_8bit", "AdamW with 8-bit states.", {**_ADAMW, **_EIGHT_BITS}),
    ("lion_8bit", "Lion with an 8-bit state.", {**_LION, **_EIGHT_BITS}),
    ("sgd_8bit", "Stochastic gradient descent with an 8-bit momentum.", {**_SGD, **_EIGHT_BITS}),
    ("rmsprop_8bit", "RMSprop with an 8-bit state.", {**_RMSPROP, **_EIGHT_BITS}),
    ("adagrad_8bit", "Adagrad with an 8-bit state.", {**_ADAGRAD, **_EIGHT_BITS}),
    (
        "paged_adam",
        "Adam with 32-bit states in pages that move to the machine's memory when the GPU's runs out. Needs CUDA.",
        _ADAM,
    ),
    ("paged_adamw", "AdamW with paged 32-bit states. Needs CUDA.", _ADAMW),
    ("paged_lion", "Lion with a paged 32-bit state. Needs CUDA.", _LION),
    ("paged_adam_8bit", "Adam with paged 8-bit states. Needs CUDA.", {**_ADAM, **_EIGHT_BITS}),
    ("paged_adamw_8bit", "AdamW with paged 8-bit states. Needs CUDA.", {**_ADAMW, **_EIGHT_BITS}),
    ("paged_lion_8bit", "Lion with a paged 8-bit state. Needs CUDA.", {**_LION, **_EIGHT_BITS}),
)


def _section(name: str, text: str, keys: _Keys) -> type[BitsandbytesOptimizerConfig]:
    fields: dict[str, Any] = {"type": (Literal[name], key(name, "The optimizer.")), **keys}
    title = "".join(word.capitalize() for word in name.split("_"))
    return create_model(f"{title}Config", __base__=BitsandbytesOptimizerConfig, __doc__=text, **fields)


_SECTIONS = (AdamConfig, AdamWConfig, SGDConfig, AdafactorConfig, *(_section(*each) for each in _BITSANDBYTES))

if TYPE_CHECKING:
    OptimizerConfig: TypeAlias = AdamConfig | AdamWConfig | SGDConfig | AdafactorConfig | BitsandbytesOptimizerConfig
    OptimizerField: TypeAlias = OptimizerConfig
else:
    OptimizerConfig = Union[_SECTIONS]  # noqa: UP007 - of a tuple
    OptimizerField = Annotated[
        Annotated[OptimizerConfig, Field(discriminator="type")],
        Short(types=[section.model_fields["type"].default for section in _SECTIONS], default="adam"),
    ]
