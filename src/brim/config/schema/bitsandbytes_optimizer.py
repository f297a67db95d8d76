"""`trainer.optimizer`: the update rules that come from bitsandbytes, with 8-bit or paged states."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Strict

from brim.config.schema.base import NonNegativeFloat, NonNegativeInt, Section, key

_Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
_Betas: TypeAlias = Annotated[tuple[_Beta, _Beta], Strict(False)]
_Momentum: TypeAlias = Annotated[float, Field(gt=0, lt=1)]

_TYPE = "The optimizer."
_TWO_BETAS = "two numbers from 0 to below 1, such as [0.9, 0.999]"
_ADAM_BETAS = key(
    (0.9, 0.999), "How slowly the running averages of the gradient and of its square forget.", expected=_TWO_BETAS
)
_LION_BETAS = key((0.9, 0.99), "How slowly the direction and its running average forget.", expected=_TWO_BETAS)
_EPS = key(1e-8, "Added to the denominator.")
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

    type: Literal["lion"] = key("lion", _TYPE)
    betas: _Betas = _LION_BETAS
    weight_decay: NonNegativeFloat = _DECOUPLED


class Adam8bitConfig(Section):
    """Adam with 8-bit states: a quarter of the memory, in blocks of 256 values with a scale each."""

    type: Literal["adam_8bit"] = key("adam_8bit", _TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS
    weight_decay: NonNegativeFloat = _DECOUPLED_IN_ADAM
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class AdamW8bitConfig(Section):
    """AdamW with 8-bit states."""

    type: Literal["adamw_8bit"] = key("adamw_8bit", _TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS
    weight_decay: NonNegativeFloat = _DECOUPLED
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class Lion8bitConfig(Section):
    """Lion with an 8-bit state."""

    type: Literal["lion_8bit"] = key("lion_8bit", _TYPE)
    betas: _Betas = _LION_BETAS
    weight_decay: NonNegativeFloat = _DECOUPLED
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class SGD8bitConfig(Section):
    """Stochastic gradient descent with an 8-bit momentum."""

    type: Literal["sgd_8bit"] = key("sgd_8bit", _TYPE)
    momentum: _Momentum = key(
        0.9, "How much of the previous update is kept. Ludwig's default is 0, which bitsandbytes does not have."
    )
    weight_decay: NonNegativeFloat = _PENALTY
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class RMSprop8bitConfig(Section):
    """RMSprop with an 8-bit state."""

    type: Literal["rmsprop_8bit"] = key("rmsprop_8bit", _TYPE)
    alpha: _Momentum = key(0.99, "How slowly the running average of the squared gradient forgets.")
    eps: NonNegativeFloat = _EPS
    weight_decay: NonNegativeFloat = _PENALTY
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class Adagrad8bitConfig(Section):
    """Adagrad with an 8-bit state."""

    type: Literal["adagrad_8bit"] = key("adagrad_8bit", _TYPE)
    eps: NonNegativeFloat = key(1e-10, "Added to the denominator.")
    weight_decay: NonNegativeFloat = _PENALTY
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class PagedAdamConfig(Section):
    """Adam with 32-bit states in pages that move to the machine's memory when the GPU's runs out. Needs CUDA."""

    type: Literal["paged_adam"] = key("paged_adam", _TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS
    weight_decay: NonNegativeFloat = _DECOUPLED_IN_ADAM
    amsgrad: Literal[False] = _NO_AMSGRAD


class PagedAdamWConfig(Section):
    """AdamW with paged 32-bit states. Needs CUDA."""

    type: Literal["paged_adamw"] = key("paged_adamw", _TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS
    weight_decay: NonNegativeFloat = _DECOUPLED
    amsgrad: Literal[False] = _NO_AMSGRAD


class PagedLionConfig(Section):
    """Lion with a paged 32-bit state. Needs CUDA."""

    type: Literal["paged_lion"] = key("paged_lion", _TYPE)
    betas: _Betas = _LION_BETAS
    weight_decay: NonNegativeFloat = _DECOUPLED


class PagedAdam8bitConfig(Section):
    """Adam with paged 8-bit states. Needs CUDA."""

    type: Literal["paged_adam_8bit"] = key("paged_adam_8bit", _TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS
    weight_decay: NonNegativeFloat = _DECOUPLED_IN_ADAM
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class PagedAdamW8bitConfig(Section):
    """AdamW with paged 8-bit states. Needs CUDA."""

    type: Literal["paged_adamw_8bit"] = key("paged_adamw_8bit", _TYPE)
    betas: _Betas = _ADAM_BETAS
    eps: NonNegativeFloat = _EPS
    weight_decay: NonNegativeFloat = _DECOUPLED
    amsgrad: Literal[False] = _NO_AMSGRAD
    min_8bit_size: NonNegativeInt = _MIN_8BIT_SIZE


class PagedLion8bitConfig(Section):
    """Lion with a paged 8-bit state. Needs CUDA."""

    type: Literal["paged_lion_8bit"] = key("paged_lion_8bit", _TYPE)
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
