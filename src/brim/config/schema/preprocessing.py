"""`preprocessing`: which rows are used, and how they are cut and split."""

from typing import Annotated, Literal

from pydantic import Field

from brim.config.schema.base import Fraction, PositiveInt, Section, key
from brim.config.schema.split import RandomSplit, SplitField


class PreprocessingConfig(Section):
    """Which rows are used, and how they are cut and split."""

    sample_ratio: Annotated[float, Field(gt=0, le=1)] = key(1.0, "Share of the rows that is used.")
    sample_size: PositiveInt | None = key(None, "Number of rows that are used; not together with `sample_ratio`.")
    split: SplitField = key(RandomSplit(), "Which rows train, which validate, which test.")
    global_max_sequence_length: PositiveInt | None = key(
        None,
        "Tokens kept of prompt, answer and end-of-sequence together; longer rows are cut and counted in the ledger. "
        "null: the model's context, and `on_overlong` says what happens to longer rows.",
    )
    on_overlong: Literal["auto", "error", "drop", "truncate"] = key(
        "auto",
        "Rows longer than the model's context (for predictions: prompts longer than the context less "
        "`generation.max_new_tokens`), where no length cuts them: an error, left out, or cut to it, keeping the first "
        "tokens. `auto`: in training and evaluation left out where they are few, see `max_dropped_fraction`, else an "
        "error. What is dropped or cut is counted in the ledger.",
        brim=True,
    )
    on_bad_row: Literal["auto", "error", "drop"] = key(
        "auto",
        "Rows that cannot be read or used (a broken line, bytes that are no text, a cell of another type than its "
        "column, a conversation without an answer, an empty prompt to predict from): an error with their places, or "
        "left out and named in the ledger. `auto`: in training and evaluation left out where they are few, see "
        "`max_dropped_fraction`, else an error.",
        brim=True,
    )
    drop_unlearnable: bool | Literal["auto"] = key(
        "auto",
        "Leave out rows that have no supervised token left after cutting, instead of an error. `auto`: where they are "
        "few, see `max_dropped_fraction`.",
        brim=True,
    )
    max_dropped_fraction: Fraction = key(
        0.01,
        "Share of the rows (of all splits) that training and evaluation leave out at most where `on_bad_row`, "
        "`on_overlong` and `drop_unlearnable` are `auto`, all kinds together; they are counted, named and in the "
        "ledger. More of them are an error.",
        brim=True,
    )
