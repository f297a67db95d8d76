"""`preprocessing.split`: which rows train, which validate, which test."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Strict

from brim.config.schema.base import Fraction, Section, Text, Typed, key, required

Probabilities: TypeAlias = Annotated[tuple[Fraction, Fraction, Fraction], Strict(False)]

_TYPE = "How rows are dealt out. `split: random` is short for `{type: random}`."
_PROBABILITIES = "Shares of train, validation and test."
_THREE = "three numbers from 0 to 1 that sum to 1: train, validation, test, such as [0.7, 0.1, 0.2]"


class RandomSplit(Section):
    """By chance, from `random_seed`."""

    type: Literal["random"] = key("random", _TYPE)
    probabilities: Probabilities = key((0.7, 0.1, 0.2), _PROBABILITIES, expected=_THREE)


class FixedSplit(Section):
    """By a column that holds 0 (train), 1 (validation) or 2 (test)."""

    type: Literal["fixed"] = key("fixed", _TYPE)
    column: Text = key("split", "The column with 0, 1 or 2.")


class HashSplit(Section):
    """By a hash of a column: rows with the same value stay together, in every run and file."""

    type: Literal["hash"] = key("hash", _TYPE)
    column: Text = required("The column that is hashed.")
    probabilities: Probabilities = key((0.7, 0.1, 0.2), _PROBABILITIES, expected=_THREE)


class StratifySplit(Section):
    """By chance, with the same shares of each value of a column in every split."""

    type: Literal["stratify"] = key("stratify", _TYPE)
    column: Text = required("The column whose values keep their shares.")
    probabilities: Probabilities = key((0.7, 0.1, 0.2), _PROBABILITIES, expected=_THREE)


SplitConfig: TypeAlias = RandomSplit | FixedSplit | HashSplit | StratifySplit
SplitField: TypeAlias = Annotated[
    Annotated[SplitConfig, Field(discriminator="type")],
    Typed("random", "fixed", "hash", "stratify", default="random"),
]
