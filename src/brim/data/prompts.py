"""Make prompt and answer texts of rows, and set the lengths at which rows are cut.

The lengths are those of the configuration and of the model's context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.config.prompts import CONTEXT, SAMPLE, Template, prompt_columns, prompt_template
from brim.config.schema import Config, PreprocessingConfig
from brim.data.read import RowFaults, Source, blocks
from brim.data.split import INPUT, OUTPUT, answer_column, data_problems, input_columns, wanted_columns
from brim.data.tokens import Limit, Limits, TextEncoder, Texts
from brim.data.usable import Column, leaving_none_unasked, usable
from brim.errors import DataError, Problem
from brim.notes import warning
from brim.units import format_count

if TYPE_CHECKING:
    from brim.data.chat import ChatPrompter
    from brim.data.retrieval import Contexts


_GLOBAL = "preprocessing.global_max_sequence_length"


_TRUNCATE = "preprocessing.on_overlong is truncate"


def learning_limits(config: Config, context_length: int | None) -> Limits:
    """Return the limits for rows with an answer. A global length beyond the context counts as the context's.

    Without one, the context is the limit where preprocessing.on_overlong is truncate.
    """
    return Limits(
        prompt=_feature_limit(config.input_features[0].preprocessing.max_sequence_length, INPUT),
        answer=_feature_limit(config.output_features[0].preprocessing.max_sequence_length, OUTPUT),
        joined=_joined_limit(config.preprocessing, context_length),
        context_length=context_length,
    )


def prompt_limits(config: Config, context_length: int | None = None) -> Limits:
    """Return the limits for prompts alone. context_length: given where nothing is to follow the prompts."""
    preprocessing = config.preprocessing.model_copy(update={"global_max_sequence_length": None})  # of whole rows
    return Limits(
        prompt=_feature_limit(config.input_features[0].preprocessing.max_sequence_length, INPUT),
        joined=_joined_limit(preprocessing, context_length),
        context_length=context_length,
    )


def require_room_for_template(asked: Prompter, encoder: TextEncoder, limits: Limits) -> None:
    """Raise DataError when the template alone, with nothing filled in, is longer than a limit."""
    if asked.template is None:
        return
    num_tokens = len(encoder.encode([asked.bare_template], special_tokens=True)[0])
    DataError.raise_for(
        Problem(
            what=f"the prompt template alone takes {format_count(num_tokens, 'token')}, and {limit.why}",
            where=asked.template_key,
            expected="a length that leaves room for the row's values",
            fix=f"raise the length or shorten the {asked.template_key.removeprefix('prompt.')}",
        )
        for limit in (limits.prompt, limits.joined)
        if limit is not None and num_tokens > limit.num_tokens
    )


def _feature_limit(length: int | None, feature: str) -> Limit | None:
    if length is None:
        return None
    return Limit(num_tokens=length, why=f"{feature}.preprocessing.max_sequence_length is {length:,}")


def _joined_limit(preprocessing: PreprocessingConfig, context_length: int | None) -> Limit | None:
    length = preprocessing.global_max_sequence_length
    if length is None:
        if preprocessing.on_overlong != "truncate" or context_length is None:
            return None
        return Limit(num_tokens=context_length, why=f"{_TRUNCATE}, and the context is {context_length:,} tokens")
    if context_length is not None and length > context_length:
        return Limit(num_tokens=context_length, why=f"{_GLOBAL} is {length:,}, the model's context {context_length:,}")
    return Limit(num_tokens=length, why=f"{_GLOBAL} is {length:,}")


_NUMBER_FORMATS = frozenset("bcdeEfFgGnoxX%")


@dataclass(slots=True, kw_only=True)
class Prompter:
    """Make prompts and answers of a source's columns, as a configuration says."""

    source: Source
    template: Template | None
    template_key: str  # of the configuration, which gives the template
    input_column: str
    prompt_columns: tuple[Column, ...]
    answer_column: Column | None  # None where only prompts are asked for
    faults: RowFaults  # takes the rows that the template cannot be filled with, which are left out of the texts
    contexts: Contexts | None = None  # where examples are asked for
    num_escaped: int = 0  # rows, drawn so far, whose input reads otherwise as {__sample__}

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.prompt_columns if self.answer_column is None else (*self.prompt_columns, self.answer_column)

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Return the names of all columns that are read, with that of the examples' answers."""
        names = [column.name for column in self.columns]
        return tuple(names) if self.contexts is None else (*names, self.contexts.answer_column)

    @property
    def bare_template(self) -> str:
        """Return the text that stands in the prompt of every row, the task included."""
        parts = () if self.template is None else self.template.parts
        return "".join(part for part in parts if isinstance(part, str))

    def notes(self) -> list[str]:
        """Return notes on the rows drawn so far."""
        notes = [] if self.contexts is None else self.contexts.notes()
        if self.num_escaped:
            rows = format_count(self.num_escaped, "row")
            note = (
                f"{{{SAMPLE}}} writes line breaks, quotes, backslashes and letters beyond ASCII as JSON does, as in "
                f"Ludwig, which changes the input of {rows}; in a template, {{{self.input_column}}} is the plain text"
            )
            short = f"{{{SAMPLE}}} changes the input of {rows}, as in Ludwig"
            notes.append(warning(note, topic="rows", short=short))
        return notes

    def texts(self, keys: npt.NDArray[np.int64]) -> Iterator[Texts]:
        """Give these rows (ascending) in batches; no cell of theirs may be missing unless its strategy fills it."""
        table = self.source.table.select(list(dict.fromkeys(column.name for column in self.columns)))
        row_bytes = len(self.bare_template) + (0 if self.contexts is None else self.contexts.row_bytes)
        for batch_keys, block in blocks(table, keys, row_bytes=row_bytes):
            texts = self._texts(batch_keys, block)
            if len(texts.keys):
                yield texts

    def _texts(self, keys: npt.NDArray[np.int64], block: pa.Table) -> Texts:
        cells = {column.name: column.texts(block) for column in self.columns}
        answers = cells[self.answer_column.name] if self.answer_column is not None else []
        prompts, own_prompts = self._prompts(keys, cells)
        texts = Texts(keys=keys, prompts=[prompt or "" for prompt in prompts], answers=answers, own_prompts=own_prompts)
        return texts.only([number for number, prompt in enumerate(prompts) if prompt is not None])

    def _prompts(
        self, keys: npt.NDArray[np.int64], cells: dict[str, list[str]]
    ) -> tuple[Sequence[str | None], list[str] | None]:
        """Return each row's prompt, None where it cannot be made, and, with examples, the prompts without them."""
        if self.template is None:
            return cells[self.input_column], None
        columns = {name: self._values(name, cells) for name in self.template.names if name != CONTEXT}
        cell_types = {name: _CommaCell for name in columns if name in cells and self.source.has_decimal_commas(name)}
        contexts = None if self.contexts is None else self.contexts.of(keys, cells, self.faults)
        prompts: list[str | None] = []
        own_prompts: list[str] = []
        for number, key in enumerate(keys.tolist()):
            values = {name: cell_types.get(name, _Cell)(texts[number]) for name, texts in columns.items()}
            context = "" if contexts is None else contexts[number]
            try:
                own = self.template.render({**values, CONTEXT: ""})
                prompt = own if not context else self.template.render({**values, CONTEXT: context})
            except DataError as error:
                self.faults.add(key, error.problems[0])
                own, prompt = "", None
            own_prompts.append(own)
            prompts.append(None if context is None else prompt)
        return prompts, own_prompts if contexts is not None else None

    def _values(self, name: str, cells: Mapping[str, list[str]]) -> list[str]:
        """Return the text of each row that stands for a name of the template."""
        if name != SAMPLE:
            return cells[name]
        texts = cells[self.input_column]
        escaped = [as_sample(text) for text in texts]
        self.num_escaped += sum(text != sample for text, sample in zip(texts, escaped, strict=True))
        return escaped


def prompter(
    config: Config,
    source: Source,
    *,
    with_answers: bool,
    encoder: TextEncoder | None = None,
    split: str | None = None,
    with_examples: bool = True,
) -> Prompter | ChatPrompter:
    """Check that the data has the columns that a configuration asks for, and rows that can be used.

    The rows that cannot be used for these columns are among the faults of the result's source, or an error, as
    preprocessing.on_bad_row says.

    encoder: with `chat`, the tokenizer whose template writes the conversations.
    split: of the source, that is prepared alone; None where all are. with_examples: False where the answers alone are
    wanted, and none need be retrieved.
    Raises DataError naming each column that is missing or holds no plain values; see chat_prompter for conversations,
    contexts_of for examples.
    """
    wanted = wanted_columns(config, with_answers=with_answers)
    read = list(wanted) if config.chat is None else []  # as texts; a conversation is looked at row by row
    try:
        source.require_columns(wanted)
        policy = config.preprocessing if with_answers else leaving_none_unasked(config.preprocessing)
        source = usable(source, read, policy)
        source.require_text(read)
    except DataError:  # report all that is wrong, not the first problem alone
        raise DataError(*data_problems(config, source, with_answers=with_answers, only=split)) from None
    if config.chat is not None:
        from brim.data.chat import chat_prompter  # here, since it imports Jinja

        assert encoder is not None, "conversations need a tokenizer's template"
        return chat_prompter(config.chat, source, encoder, with_answers=with_answers)
    feature, target = config.input_features[0], config.output_features[0]
    columns = prompt_columns(config)
    contexts = None
    if with_examples and config.prompt.num_examples:
        from brim.data.retrieval import contexts_of  # here, since it reads the prompts' columns itself

        contexts = contexts_of(config, source, columns=columns, split=split)
    return Prompter(
        source=source,
        template=prompt_template(config),
        template_key="prompt.task" if config.prompt.template is None else "prompt.template",
        input_column=feature.column_name,
        prompt_columns=input_columns(config, columns),
        answer_column=answer_column(target) if with_answers else None,
        faults=RowFaults(locate=source.locate),
        contexts=contexts,
    )


def as_sample(text: str) -> str:
    """Write a text as Ludwig does for `{__sample__}`: as JSON, without quotes at its ends (the text's own, too)."""
    return json.dumps(text).strip('"')


class _Cell(str):
    """Hold a cell's text, which a number format of the template reads as a number."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec[-1:] not in _NUMBER_FORMATS:
            return format(str(self), spec)
        try:
            return format(int(self), spec)
        except ValueError:
            return format(float(self), spec)


class _CommaCell(_Cell):
    """Hold a cell whose number has a decimal comma."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return format(_Cell(self.replace(",", ".")), spec) if spec else str(self)
