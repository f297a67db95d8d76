"""Declare the sections about data: columns, prompts, conversations, splits and which rows are used.

- `input_features` and `output_features`: which columns hold the prompt and the answer.
- `prompt`: how a row becomes the text that the model reads.
- `chat`: conversations, written out by a chat template, instead of a prompt and an answer.
- `preprocessing`: which rows are used, and how they are cut and split.
- `preprocessing.split`: which rows train, which validate, which test.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

from brim.config.schema.base import Fraction, Items, NonNegativeInt, PositiveInt, Section, Short, Text, key, required


def _as_text(value: Any) -> Any:
    """Return a date as text: YAML reads 2026-01-31 without quotes as a date."""
    return value.isoformat() if type(value) is datetime.date else value


def _real_day(text: str) -> str:
    if datetime.date.fromisoformat(text).isoformat() != text:
        raise ValueError("not written as 2026-01-31")
    return text


Day: TypeAlias = Annotated[str, AfterValidator(_real_day), BeforeValidator(_as_text)]


class ChatConfig(Section):
    """Conversations are read from a column and become text. The model learns what the assistant says."""

    messages: Text = key(
        "messages", "The column with the conversations: in each row a list of `{role, content}`.", brim=True
    )
    tools: Text | None = key(
        None,
        "The column with the tools that the assistant may call: in each row a list of JSON schemas. null: the column "
        "`tools`, where the data has one.",
        brim=True,
    )
    template: Text | None = key(
        None,
        "A file with a Jinja template, or a folder with one, such as a run's `model`. null: the tokenizer's own.",
        brim=True,
    )
    supervise: Literal["all", "last"] = key(
        "all",
        "The assistant's turns that are learned: all of them, or only the last one of each conversation.",
        brim=True,
    )
    date: Day | None = key(
        None,
        "The day that the template sees as today. null: where it asks for it, the day on which the run begins, which "
        "the run's config.yaml then records.",
        brim=True,
        expected="a day such as 2026-01-31, or null",
    )


class FeaturePreprocessing(Section):
    """A column's values become tokens."""

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
    """The answers of the data become tokens, and a category has labels."""

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
    """A label is found in the generated text by this rule. The key above is the label."""

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
        """Return the column in the data."""
        return self.column if self.column is not None else self.name


class InputFeature(_Feature):
    """The model reads these columns. With a prompt template, `name` need not be a column of the data."""

    type: Literal["text", "category", "number", "binary"] = required(
        "The feature's type. The model reads each of them as text, as it stands in the data."
    )
    preprocessing: FeaturePreprocessing = key(FeaturePreprocessing(), "How the column's values become tokens.")
    encoder: Annotated[PassthroughEncoder, Short(types=("passthrough",), default="passthrough")] = key(
        PassthroughEncoder(), "How the input is encoded."
    )


class OutputFeature(_Feature):
    """The model learns to write this column."""

    type: Literal["text", "category"] = required(
        "`text`: the model's text is the answer. `category`: a label is looked for in it."
    )
    preprocessing: OutputPreprocessing = key(OutputPreprocessing(), "How the column's values become tokens.")
    decoder: Annotated[
        Annotated[Extractor, Field(discriminator="type")],
        Short(types=("text_extractor", "category_extractor"), default="text_extractor"),
    ] = key(TextExtractor(), f"{_EXTRACTOR} A category's default is `category_extractor`.")

    @model_validator(mode="before")
    @classmethod
    def _decoder_of_a_category(cls, value: Any) -> Any:
        """Add the decoder's type, if the rest shows which it is."""
        decoder = value.get("decoder", {}) if isinstance(value, dict) else None
        if not isinstance(decoder, dict) or "type" in decoder:
            return value
        if value.get("type") == "category" or "match" in decoder:
            return {**value, "decoder": {"type": "category_extractor", **decoder}}
        return value

    @property
    def categories(self) -> CategoryExtractor | None:
        """Return how a label is found; None if the answer is a text."""
        return self.decoder if isinstance(self.decoder, CategoryExtractor) else None

    @property
    def rules(self) -> Mapping[str, MatchRule]:
        """Return how each label is found; nothing of a category whose labels are still to come from the data."""
        decoder = self.categories
        return {} if decoder is None or decoder.match is None else decoder.match

    @property
    def fallback_label(self) -> str | None:
        """Return the label of an answer in which no rule finds one."""
        decoder = self.categories
        return self.preprocessing.fallback_label or (None if decoder is None else decoder.fallback_label)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return all labels of a category, each once; none of a text, or if they are still to come from the data."""
        fallback, named = self.fallback_label, self.preprocessing.vocab or tuple(self.rules)
        if self.categories is None or not named:
            return ()
        return tuple(dict.fromkeys((*named, *(() if fallback is None else (fallback,)))))

    def with_labels_matched(self, labels: tuple[str, ...]) -> OutputFeature:
        """Return the category with a rule for each label that looks for the label's own text."""
        decoder = self.categories
        assert decoder is not None
        match = {label: MatchRule(type="contains", value=label) for label in _longer_first(labels)}
        return self.model_copy(update={"decoder": decoder.model_copy(update={"match": match})})


def _longer_first(labels: tuple[str, ...]) -> list[str]:
    """Return the labels in their order, but each after those that contain it: the first rule that fits decides."""
    ordered: list[str] = []
    for label in labels:
        longer = [each for each in labels if label.lower() in each.lower() and len(each) > len(label)]
        for each in [*sorted(longer, key=len, reverse=True), label]:
            if each not in ordered:
                ordered.append(each)
    return ordered


Probabilities: TypeAlias = Annotated[tuple[Fraction, Fraction, Fraction], Strict(False)]


_TYPE = "How rows are dealt out. `split: random` is short for `{type: random}`."


_PROBABILITIES = "Shares of train, validation and test."


_THREE = "three numbers from 0 to 1 that sum to 1: train, validation, test, such as [0.7, 0.1, 0.2]"


class RandomSplit(Section):
    """Rows are dealt out by chance, from `random_seed`."""

    type: Literal["random"] = key("random", _TYPE)
    probabilities: Probabilities = key((0.7, 0.1, 0.2), _PROBABILITIES, expected=_THREE)


class FixedSplit(Section):
    """Rows are dealt out by a column that holds 0 (train), 1 (validation) or 2 (test)."""

    type: Literal["fixed"] = key("fixed", _TYPE)
    column: Text = key("split", "The column with 0, 1 or 2.")


class HashSplit(Section):
    """Rows are dealt out by a hash of a column: those with the same value stay together, in every run and file."""

    type: Literal["hash"] = key("hash", _TYPE)
    column: Text = required("The column that is hashed.")
    probabilities: Probabilities = key((0.7, 0.1, 0.2), _PROBABILITIES, expected=_THREE)


class StratifySplit(Section):
    """Rows are dealt out by chance, with the same shares of each value of a column in every split."""

    type: Literal["stratify"] = key("stratify", _TYPE)
    column: Text = required("The column whose values keep their shares.")
    probabilities: Probabilities = key((0.7, 0.1, 0.2), _PROBABILITIES, expected=_THREE)


SplitConfig: TypeAlias = RandomSplit | FixedSplit | HashSplit | StratifySplit


SplitField: TypeAlias = Annotated[
    Annotated[SplitConfig, Field(discriminator="type")],
    Short(types=("random", "fixed", "hash", "stratify"), default="random"),
]


class PreprocessingConfig(Section):
    """Rows are chosen, cut and split by these keys."""

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


class RetrievalConfig(Section):
    """Rows of the training split are put into the prompt as examples."""

    type: Literal["random", "semantic"] | None = key(
        None,
        "`random`: rows drawn by chance, for each row its own, which `random_seed` and the row's input alone decide. "
        "`semantic`: the rows whose input is most like the row's own. null: none. No example has the row's own input.",
    )
    k: NonNegativeInt = key(0, "Examples in a prompt. 0 with a `type`: 1.")
    model_name: Text | None = key(
        None,
        "For `semantic`: the sentence-transformers model that compares inputs, a folder or a Hub id "
        "(`pip install 'brim[retrieval]'`).",
    )
    index_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")] | None = key(
        None,
        "The folder's name under which what `semantic` computed is kept in the cache; it is made again when data or "
        "model changed. null: a name made of both.",
        expected="a name of letters, digits, dots, dashes and underscores, or null",
    )

    @property
    def num_examples(self) -> int:
        """Return the number of examples in a prompt."""
        return 0 if self.type is None else max(1, self.k)


class PromptConfig(Section):
    """The prompt is made of these texts and the row's values."""

    template: str | None = key(
        None,
        "The prompt with `{column}` for a column's value (`{price:.2f}` with a number format), `{__sample__}` for the "
        "input feature's value as JSON writes it, `{__task__}` for `task`, `{__labels__}` for the labels of a category "
        "and `{__context__}` for the retrieved rows; `{{` and `}}` are literal braces. null: a built-in one where "
        "`task` is set, else the input feature's value as it is, or a line for each of several.",
    )
    task: Text | None = key(None, "What the model shall do with the input, in words: the template's `{__task__}`.")
    retrieval: RetrievalConfig | None = key(
        None,
        "Examples from the training split in the prompt: the template's `{__context__}`.",
        expected="a mapping such as {type: random, k: 2}, or null",
    )

    @property
    def num_examples(self) -> int:
        """Return how many rows of the training split stand in each prompt."""
        return 0 if self.retrieval is None else self.retrieval.num_examples
