"""What is kept beside a table, in columns that only brim sees, so that it stays with the table wherever that is kept.

Why a row could not be read, and of which kind each cell of a mixed column is.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import pyarrow as pa

from brim.errors import Problem

MARK = "\0"  # begins the names of hidden columns; readers refuse it in the data's own names
FAULT = f"{MARK}fault"
_KIND = f"{MARK}kind:"


def fault_text(problem: Problem) -> str:
    """A problem as a cell of the column FAULT."""
    return json.dumps(asdict(problem))


def kind_field(name: str) -> pa.Field:
    """The hidden column with the kinds ("text", "a number", …) of a mixed column's cells."""
    return pa.field(_KIND + name, pa.string())


def kind_of_column(field: pa.Field) -> str | None:
    """The mixed column to which a field's kinds belong; None for other fields."""
    name: str = field.name
    return name.removeprefix(_KIND) if name.startswith(_KIND) else None


def shown(table: pa.Table) -> pa.Table:
    """The table without its hidden columns."""
    hidden = [name for name in table.column_names if name.startswith(MARK)]
    return table.drop_columns(hidden) if hidden else table


def faults_of(table: pa.Table) -> dict[int, Problem]:
    """The rows that could not be read, by row number."""
    if FAULT not in table.column_names:
        return {}
    faults: dict[int, Problem] = {}
    first_row = 0
    for chunk in table[FAULT].chunks:
        rows = chunk.is_valid().to_numpy(zero_copy_only=False).nonzero()[0].tolist()
        faults |= {first_row + row: Problem(**json.loads(chunk[row].as_py())) for row in rows}
        first_row += len(chunk)
    return faults


def kinds_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The kinds of the cells of each mixed column."""
    named = {kind_of_column(field): table[field.name] for field in table.schema}
    return {name: kinds for name, kinds in named.items() if name is not None}
