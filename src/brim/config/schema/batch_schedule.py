"""A batch that moves while training: the sections and the values of the keys of `trainer` that move it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainSerializer, WithJsonSchema, create_model

from brim.config.schema.base import PositiveInt, Section, Text, key, required

DURATION = "a duration: a number with ba, ep, sp, tok or dur, such as 0.1dur or 5000sp"

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
    """A ramp from a first effective batch to `trainer.effective_batch_size`, which then holds to the end."""

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
        """The value of `from`."""
        rows: int | None = getattr(self, "from")
        return rows


class NoiseScaleAdaptation(Section):
    """The batch follows the measured gradient noise scale: in steps of a factor 2, within bounds."""

    type: Literal["noise_scale"] = key("noise_scale", "What the batch follows.", brim=True)
    min: PositiveInt = required("The fewest rows of an update, at least 2: one row shows no noise.", brim=True)
    max: PositiveInt = required("The most rows of an update.", brim=True)


def _function_name(function: str | Callable[..., Any] | None) -> str | None:
    """A function as it stands in a file: `module:name`."""
    if function is None or isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


IncreaseFunction: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1)] | Annotated[Callable[..., Any], WithJsonSchema({"type": "string"})] | None,
    PlainSerializer(_function_name, return_type=str | None, when_used="json"),
]
