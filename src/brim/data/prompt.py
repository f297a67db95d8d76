"""Rows as prompt and answer texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.config import Config
from brim.config.template import SAMPLE, Parts, names, parse_template, render
from brim.data.columns import INPUT, OUTPUT, Column, column_for, require_columns, require_text
from brim.data.source import Source
from brim.errors import DataError, Problem

BATCH_ROWS = 1024
_NUMBER_FORMATS = frozenset("bcdeEfFgGnoxX%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Prompts and answers of some rows, as text."""

    keys: npt.NDArray[np.int64]  # 0-based row numbers in the source
    prompts: list[str]
    answers: list[str]  # empty when only prompts were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompter:
    """What a configuration makes of a source's columns."""

    source: Source
    template: Parts | None
    input_column: str
    prompt_columns: tuple[Column, ...]
    answer_column: Column | None  # None where only prompts are asked for

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.prompt_columns if self.answer_column is None else (*self.prompt_columns, self.answer_column)

    @property
    def bare_template(self) -> str:
        """What stands in the prompt of every row."""
        return "".join(part for part in self.template or () if isinstance(part, str))

    def texts(self, keys: npt.NDArray[np.int64]) -> Iterator[Texts]:
        """These rows (ascending) in batches; no cell of theirs may be missing unless its strategy fills it."""
        table = self.source.table.select(list(dict.fromkeys(column.name for column in self.columns)))
        for start in range(0, table.num_rows, BATCH_ROWS):
            low, high = np.searchsorted(keys, [start, start + BATCH_ROWS])
            if low < high:
                block = table.slice(start, BATCH_ROWS).combine_chunks().take(pa.array(keys[low:high] - start))
                yield self._texts(keys[low:high], block)

    def _texts(self, keys: npt.NDArray[np.int64], block: pa.Table) -> Texts:
        cells = {column.name: cell_texts(block[column.name], fill=column.fill_value) for column in self.columns}
        answers = cells[self.answer_column.name] if self.answer_column is not None else []
        return Texts(keys=keys, prompts=self._prompts(keys, cells), answers=answers)

    def _prompts(self, keys: npt.NDArray[np.int64], cells: dict[str, list[str]]) -> list[str]:
        if self.template is None:
            return cells[self.input_column]
        columns = {name: cells[self._column_of(name)] for name in names(self.template)}
        prompts = []
        for number, key in enumerate(keys.tolist()):
            values = {name: _Cell(texts[number]) for name, texts in columns.items()}
            try:
                prompts.append(render(self.template, values))
            except DataError as error:
                raise DataError(*(_placed(problem, self.source.locate(key)) for problem in error.problems)) from None
        return prompts

    def _column_of(self, name: str) -> str:
        return self.input_column if name == SAMPLE else name


def prompter(config: Config, source: Source, *, with_answers: bool) -> Prompter:
    """Check that the data has the columns that a configuration asks for.

    Raises DataError naming each that is missing or holds no plain values.
    """
    feature, target = config.input_features[0], config.output_features[0]
    template = None if config.prompt.template is None else parse_template(config.prompt.template)
    placeholders = (SAMPLE,) if template is None else names(template)
    columns = list(dict.fromkeys(feature.column_name if name == SAMPLE else name for name in placeholders))
    wanted = dict.fromkeys(columns, INPUT if template is None else "prompt.template")
    if with_answers:
        wanted[target.column_name] = OUTPUT
    require_columns(source, wanted)
    require_text(source, list(wanted))
    return Prompter(
        source=source,
        template=template,
        input_column=feature.column_name,
        prompt_columns=tuple(column_for(name, INPUT, feature.preprocessing) for name in columns),
        answer_column=column_for(target.column_name, OUTPUT, target.preprocessing) if with_answers else None,
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


def _placed(problem: Problem, where: str) -> Problem:
    return replace(problem, where=where)
