"""The input's rows with what was generated for each, a block at a time, so that a large data set is never whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from brim.api.prediction import LOG_PROBABILITY, ROW
from brim.config.labels import LabelReader
from brim.data import Source, TextEncoder, TokenRows
from brim.data.as_text import nested_type, nested_values, nested_word, without_origin
from brim.data.blocks import blocks
from brim.infer.labels import LabelCounts, extract
from brim.infer.response import Response


@dataclass(slots=True, kw_only=True)
class Counts:
    """What the blocks consisted of."""

    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    labels: LabelCounts = field(default_factory=LabelCounts)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Prompts of a source with their responses. response, log_probability: by the prompt's position."""

    source: Source
    prompts: TokenRows  # in the order of the source
    encoder: TextEncoder
    name: str  # of the column of responses
    response: Callable[[int], Response]
    log_probability: Callable[[int], float] | None  # None: no such column
    labels: tuple[str, LabelReader] | None = None  # a column's name, and what finds its labels in the responses
    typed: bool = False  # lists and objects of the input as Arrow's types, where they have one; else as JSON

    @property
    def schema(self) -> pa.Schema:
        """Of each block: row, the input's columns, the responses and what is known of them."""
        types = self._types
        fields = [
            pa.field(each.name, types[each.name]) if each.name in types else without_origin(each)
            for each in self.source.table.schema
        ]
        return pa.schema([pa.field(ROW, pa.int64()), *fields, *self._added_fields()])

    def blocks(self, counts: Counts) -> Iterator[pa.Table]:
        """All rows in the order of the source; `counts` fills while they are drawn."""
        schema, types, lengths = self.schema, self._types, self.prompts.lengths
        done = 0
        for rows, block in blocks(self.source.table, self.prompts.keys):
            positions = np.arange(done, done + len(rows))
            done += len(rows)
            responses = [self.response(position) for position in positions.tolist()]
            added = self._added(positions, responses, lengths[positions], counts)
            _count(counts, responses, lengths[positions])
            given = [
                pa.array(nested_values(column), types[name]) if name in types else column
                for name, column in zip(block.column_names, block.columns, strict=True)
            ]
            yield pa.table([pa.array(rows), *given, *added], schema=schema)

    @cached_property
    def _types(self) -> dict[str, pa.DataType]:
        """Of the columns that are lists or objects, where they are to be typed."""
        table = self.source.table
        nested = [each.name for each in table.schema if nested_word(each)] if self.typed else []
        found = {name: nested_type(table[name]) for name in nested}
        return {name: kind for name, kind in found.items() if kind is not None}

    def table(self, counts: Counts) -> pa.Table:
        """All blocks together."""
        return pa.concat_tables([self.schema.empty_table(), *self.blocks(counts)])

    def _added_fields(self) -> list[pa.Field]:
        names: list[tuple[str, pa.DataType]] = [
            (self.name, pa.string()),
            *([] if self.labels is None else [(self.labels[0], pa.string())]),
            ("finish_reason", pa.string()),
            ("num_prompt_tokens", pa.int64()),
            ("num_response_tokens", pa.int64()),
        ]
        if self.log_probability is not None:
            names.append((LOG_PROBABILITY, pa.float64()))
        return [pa.field(name, kind) for name, kind in names]

    def _added(
        self, positions: NDArray[np.intp], responses: list[Response], lengths: NDArray[np.int64], counts: Counts
    ) -> list[pa.Array]:
        """The columns of `_added_fields`."""
        texts = [self.encoder.decode(response.token_ids, skip_special_tokens=True) for response in responses]
        labels = [] if self.labels is None else [extract(texts, self.labels[1], counts.labels)]
        columns = [
            pa.array(texts, pa.string()),
            *(pa.array(each, pa.string()) for each in labels),
            pa.array([response.finish_reason for response in responses], pa.string()),
            pa.array(lengths, pa.int64()),
            pa.array([len(response.token_ids) for response in responses], pa.int64()),
        ]
        if self.log_probability is not None:
            columns.append(pa.array(map(self.log_probability, positions.tolist()), pa.float64()))
        return columns


def _count(counts: Counts, responses: list[Response], lengths: NDArray[np.int64]) -> None:
    counts.num_rows += len(responses)
    counts.num_prompt_tokens += int(lengths.sum())
    counts.num_response_tokens += sum(len(response.token_ids) for response in responses)
    counts.finish_reasons.update(response.finish_reason for response in responses)
