"""`input_features` and `output_features`: which columns hold the prompt and the answer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from brim.config.schema.base import Items, PositiveInt, Section, Text, Typed, key, required


class FeaturePreprocessing(Section):
    """How a column's values become tokens."""

    max_sequence_length: PositiveInt | None = key(
        None, "Tokens kept of each value; longer ones are cut and counted in the ledger. null: no limit."
    )
    missing_value_strategy: Literal["error", "fill_with_const", "drop_row"] = key(
        "fill_with_const",
        "What to do with a missing value, which is a null or an empty cell of csv: put `fill_value` there, leave the "
        "row out, or an error. Rows that are filled or left out are counted in the ledger.",
    )
    fill_value: str = key("", "The text for missing values with `fill_with_const`. Ludwig's default is `<UNK>`.")


class OutputPreprocessing(FeaturePreprocessing):
    """How the answers of the data become tokens, and which labels a category has."""

    missing_value_strategy: Literal["error", "fill_with_const", "drop_row"] = key(
        "drop_row",
        "What to do with a missing answer, which is a null, an empty cell of csv or, for a category, an empty text: "
        "leave the row out, put `fill_value` there, or an error. Rows that are filled or left out are counted in the "
        "ledger.",
    )
    fallback_label: Text | None = key(
        None,
        "The label of an answer in which no rule finds one. Required for a category, unless its labels come from the "
        "data: then null means the most frequent one.",
        expected="text",
    )
    vocab: Items[Text] | None = key(
        None,
        "The labels of a category. null: those of `decoder.match`, and `fallback_label`; without `match`, those of the "
        "data.",
        expected="a list of labels, each a text (numbers in quotes), or null",
    )


class PassthroughEncoder(Section):
    """The base model reads the text itself."""

    type: Literal["passthrough"] = key("passthrough", "The only encoder that a language model has.")


_EXTRACTOR = "How the answer is taken from the generated text."


class TextExtractor(Section):
    """The generated text is the answer."""

    type: Literal["text_extractor"] = key("text_extractor", _EXTRACTOR)


class MatchRule(Section):
    """How a label is found in the generated text. The key above is the label."""

    type: Literal["contains", "regex"] = required(
        "`contains`: the value stands in the text. `regex`: the value, a regular expression, matches somewhere in it. "
        "Upper and lower case count as equal."
    )
    value: Text = required("What is looked for.")


class CategoryExtractor(Section):
    """The answer is the label of the first rule that fits the generated text, else the fallback label."""

    type: Literal["category_extractor"] = key("category_extractor", _EXTRACTOR)
    match: Annotated[Mapping[str, MatchRule], Field(min_length=1)] | None = key(
        None,
        "A rule for each label, tried in this order. null: a rule that looks for the label itself, for each of "
        "`preprocessing.vocab` or, without it, for each value of the answer's column in the data.",
        expected="a mapping of labels to rules, such as {positive: {type: contains, value: positive}}, or null",
    )
    fallback_label: Text | None = key(
        None, "The same as `preprocessing.fallback_label`, where that is not given.", expected="text, or null"
    )
    constrain_to_vocabulary: bool = key(
        False, "Let the model write nothing but the text of one of the labels, and then end."
    )


Extractor: TypeAlias = TextExtractor | CategoryExtractor


class _Feature(Section):
    name: Text = required("The feature's name; also its column, unless `column` says otherwise.")
    column: Text | None = key(None, "The column in the data. null: the one called `name`.")

    @property
    def column_name(self) -> str:
        """The column in the data."""
        return self.column if self.column is not None else self.name


class InputFeature(_Feature):
    """What the model reads. With a prompt template, `name` may be a word that is no column of the data."""

    type: Literal["text", "category", "number", "binary"] = required(
        "The feature's type. The model reads each of them as text, as it stands in the data."
    )
    preprocessing: FeaturePreprocessing = key(FeaturePreprocessing(), "How the column's values become tokens.")
    encoder: Annotated[PassthroughEncoder, Typed("passthrough", default="passthrough")] = key(
        PassthroughEncoder(), "How the input is encoded."
    )


class OutputFeature(_Feature):
    """What the model learns to write."""

    type: Literal["text", "category"] = required(
        "`text`: the model's text is the answer. `category`: a label is looked for in it."
    )
    preprocessing: OutputPreprocessing = key(OutputPreprocessing(), "How the column's values become tokens.")
    decoder: Annotated[
        Annotated[Extractor, Field(discriminator="type")],
        Typed("text_extractor", "category_extractor", default="text_extractor"),
    ] = key(TextExtractor(), f"{_EXTRACTOR} A category's default is `category_extractor`.")

    @model_validator(mode="before")
    @classmethod
    def _decoder_of_a_category(cls, value: Any) -> Any:
        """The decoder's type, where it can be told from the rest."""
        decoder = value.get("decoder", {}) if isinstance(value, dict) else None
        if not isinstance(decoder, dict) or "type" in decoder:
            return value
        if value.get("type") == "category" or "match" in decoder:
            return {**value, "decoder": {"type": "category_extractor", **decoder}}
        return value

    @property
    def categories(self) -> CategoryExtractor | None:
        """How a label is found, where the answer is one."""
        return self.decoder if isinstance(self.decoder, CategoryExtractor) else None

    @property
    def rules(self) -> Mapping[str, MatchRule]:
        """How each label is found; of a category none, as long as its labels are to come from the data."""
        decoder = self.categories
        return {} if decoder is None or decoder.match is None else decoder.match

    @property
    def fallback_label(self) -> str | None:
        """The label of an answer in which no rule finds one."""
        decoder = self.categories
        return self.preprocessing.fallback_label or (None if decoder is None else decoder.fallback_label)

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels of a category, each once; none of a text, or as long as they are to come from the data."""
        fallback, named = self.fallback_label, self.preprocessing.vocab or tuple(self.rules)
        if self.categories is None or not named:
            return ()
        return tuple(dict.fromkeys((*named, *(() if fallback is None else (fallback,)))))
