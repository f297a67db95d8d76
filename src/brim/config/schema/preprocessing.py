"""`preprocessing`: which rows are used, and how they are cut and split."""

from typing import Annotated

from pydantic import Field

from brim.config.schema.base import PositiveInt, Section, key
from brim.config.schema.split import RandomSplit, SplitField


class PreprocessingConfig(Section):
    """Which rows are used, and how they are cut and split."""

    sample_ratio: Annotated[float, Field(gt=0, le=1)] = key(1.0, "Share of the rows that is used.")
    sample_size: PositiveInt | None = key(None, "Number of rows that are used; not together with `sample_ratio`.")
    split: SplitField = key(RandomSplit(), "Which rows train, which validate, which test.")
    global_max_sequence_length: PositiveInt | None = key(
        None,
        "Tokens kept of prompt, answer and end-of-sequence together; longer rows are cut and counted in the ledger. "
        "null: the model's context, and longer rows are an error.",
    )
    drop_unlearnable: bool = key(
        False, "Leave out rows that have no supervised token left after cutting, instead of an error.", brim=True
    )
