"""`input_features` and `output_features`: which columns hold the prompt and the answer."""

from typing import Annotated, Literal

from brim.config.schema.base import PositiveInt, Section, Text, Typed, key, required


class FeaturePreprocessing(Section):
    """How a column's values become tokens."""

    max_sequence_length: PositiveInt | None = key(
        None, "Tokens kept of each value; longer ones are cut and counted in the ledger. null: no limit."
    )
    missing_value_strategy: Literal["error", "fill_with_const", "drop_row"] = key(
        "error",
        "What to do with a missing value: a null, or an empty cell among numbers in csv. An empty text is a value. "
        "The default `error` is brim's; Ludwig's is `fill_with_const` for the input "
        "and `drop_row` for the output.",
    )
    fill_value: str = key("", "The text for empty cells with `fill_with_const`. Ludwig's default is `<UNK>`.")


class PassthroughEncoder(Section):
    """The base model reads the text itself."""

    type: Literal["passthrough"] = key("passthrough", "The only encoder that a language model has.")


class TextExtractor(Section):
    """The generated text is the answer."""

    type: Literal["text_extractor"] = key("text_extractor", "How the answer is taken from the generated text.")


class _Feature(Section):
    name: Text = required("The feature's name; also its column, unless `column` says otherwise.")
    type: Literal["text"] = required("The feature's type.")
    column: Text | None = key(None, "The column in the data. null: the one called `name`.")
    preprocessing: FeaturePreprocessing = key(FeaturePreprocessing(), "How the column's values become tokens.")

    @property
    def column_name(self) -> str:
        """The column in the data."""
        return self.column if self.column is not None else self.name


class InputFeature(_Feature):
    """What the model reads. With a prompt template, `name` may be a word that is no column of the data."""

    encoder: Annotated[PassthroughEncoder, Typed("passthrough", default="passthrough")] = key(
        PassthroughEncoder(), "How the input is encoded."
    )


class OutputFeature(_Feature):
    """What the model learns to write."""

    decoder: Annotated[TextExtractor, Typed("text_extractor", default="text_extractor")] = key(
        TextExtractor(), "How the answer is taken from the generated text."
    )
