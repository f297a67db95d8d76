"""Rows as prompt and answer texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.config import Config
from brim.config.template import SAMPLE, Parts, names, parse_template, render
from brim.data.blocks import blocks
from brim.data.columns import INPUT, OUTPUT, Column, column_for, require_columns, require_text
from brim.data.encoder import TextEncoder
from brim.data.row_faults import RowFaults
from brim.data.source import Source
from brim.data.texts import Texts
from brim.data.usable import usable
from brim.errors import DataError

if TYPE_CHECKING:
    from brim.data.chat_prompt import ChatPrompter

__all__ = ["Prompter", "Texts", "cell_texts", "prompter"]

_NUMBER_FORMATS = frozenset("bcdeEfFgGnoxX%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompter:
    """What a configuration makes of a source's columns."""

    source: Source
    template: Parts | None
    input_column: str
    prompt_columns: tuple[Column, ...]
    answer_column: Column | None  # None where only prompts are asked for
    faults: RowFaults  # takes the rows that the template cannot be filled with, which are left out of the texts

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.prompt_columns if self.answer_column is None else (*self.prompt_columns, self.answer_column)

    @property
    def bare_template(self) -> str:
        """What stands in the prompt of every row."""
        return "".join(part for part in self.template or () if isinstance(part, str))

    def notes(self) -> list[str]:
        """What a person should know of the rows: nothing."""
        return []

    def texts(self, keys: npt.NDArray[np.int64]) -> Iterator[Texts]:
        """These rows (ascending) in batches; no cell of theirs may be missing unless its strategy fills it."""
        table = self.source.table.select(list(dict.fromkeys(column.name for column in self.columns)))
        for batch_keys, block in blocks(table, keys):
            texts = self._texts(batch_keys, block)
            if len(texts.keys):
                yield texts

    def _texts(self, keys: npt.NDArray[np.int64], block: pa.Table) -> Texts:
        cells = {column.name: cell_texts(block[column.name], fill=column.fill_value) for column in self.columns}
        answers = cells[self.answer_column.name] if self.answer_column is not None else []
        prompts = self._prompts(keys, cells)
        made = [number for number, prompt in enumerate(prompts) if prompt is not None]
        return Texts(
            keys=keys[made],
            prompts=[prompt for prompt in prompts if prompt is not None],
            answers=[answers[number] for number in made] if answers else [],
        )

    def _prompts(self, keys: npt.NDArray[np.int64], cells: dict[str, list[str]]) -> Sequence[str | None]:
        """The prompt of each row; None where the template cannot be filled."""
        if self.template is None:
            return cells[self.input_column]
        columns = {name: cells[self._column_of(name)] for name in names(self.template)}
        prompts: list[str | None] = []
        for number, key in enumerate(keys.tolist()):
            values = {name: _Cell(texts[number]) for name, texts in columns.items()}
            try:
                prompts.append(render(self.template, values))
            except DataError as error:
                self.faults.add(key, error.problems[0])
                prompts.append(None)
        return prompts

    def _column_of(self, name: str) -> str:
        return self.input_column if name == SAMPLE else name


def prompter(
    config: Config, source: Source, *, with_answers: bool, encoder: TextEncoder | None = None
) -> Prompter | ChatPrompter:
    """Check that the data has the columns that a configuration asks for, and rows that can be used.

    The rows that cannot be used for these columns are among the faults of the result's source, or an error, as
    preprocessing.on_bad_row says.

    encoder: with `chat`, the tokenizer whose template writes the conversations.
    Raises DataError naming each column that is missing or holds no plain values; see chat_prompter for conversations.
    """
    if config.chat is not None:
        from brim.data.chat_prompt import chat_prompter  # Jinja is for those who need it

        assert encoder is not None, "conversations need a tokenizer's template"
        source = usable(source, [], config.preprocessing.on_bad_row)
        return chat_prompter(config.chat, source, encoder, with_answers=with_answers)
    feature, target = config.input_features[0], config.output_features[0]
    template = None if config.prompt.template is None else parse_template(config.prompt.template)
    placeholders = (SAMPLE,) if template is None else names(template)
    columns = list(dict.fromkeys(feature.column_name if name == SAMPLE else name for name in placeholders))
    wanted = dict.fromkeys(columns, INPUT if template is None else "prompt.template")
    if with_answers:
        wanted[target.column_name] = OUTPUT
    require_columns(source, wanted)
    source = usable(source, list(wanted), config.preprocessing.on_bad_row)
    require_text(source, list(wanted))
    return Prompter(
        source=source,
        template=template,
        input_column=feature.column_name,
        prompt_columns=tuple(column_for(name, INPUT, feature.preprocessing) for name in columns),
        answer_column=column_for(target.column_name, OUTPUT, target.preprocessing) if with_answers else None,
        faults=RowFaults(locate=source.locate),
    )


def cell_texts(column: pa.ChunkedArray, *, fill: str = "") -> list[str]:
    """Cells as text: numbers as Python writes them ("3", "0.5"), "True" and "False", dates as 2024-01-31."""
    if pa.types.is_floating(column.type) and column.type != pa.float64():
        cells = list(column.to_numpy())  # numpy writes a float32 as short as it can be: 0.1
        return [fill if cell is None or cell != cell else str(cell) for cell in cells]
    cells = column.to_pylist()
    return [fill if cell is None or cell != cell else str(cell) for cell in cells]


class _Cell(str):
    """A cell's text, which a number format of the template reads as a number."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec[-1:] not in _NUMBER_FORMATS:
            return format(str(self), spec)
        try:
            return format(int(self), spec)
        except ValueError:
            return format(float(self), spec)
