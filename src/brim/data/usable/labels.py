"""Count the labels of a column, refuse those that cannot be meant, and say where a label stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from brim.data.read import Source, cell_texts
from brim.errors import DataError, Problem
from brim.units import format_count

_FEW_LABELS = 20  # so few may have one row each


_SHOWN = 10  # labels in a message


def counted(column: pa.ChunkedArray) -> Counter[str]:
    """Count the rows of each value, without white space around it; an empty value is not a label."""
    counts: Counter[str] = Counter()
    found = pc.value_counts(column)
    values = cell_texts(pa.chunked_array([found.field("values")]))
    for value, count in zip(values, found.field("counts").to_pylist(), strict=True):
        if value.strip():
            counts[value.strip()] += count
    return counts


def require_labels(counts: Counter[str], column: str, source: Source, *, most: int, fix: str, key: str) -> None:
    """Raise DataError for labels that are fewer than two, too many, or differ in case or white space alone.

    counts: rows of each label. fix: what to do instead. key: of the configuration, which makes a feature a text.
    """
    num_rows, where = counts.total(), source.name
    if len(counts) < 2:
        what = f"column `{column}` holds {format_count(len(counts), 'label')}"
        raise DataError(what=what, where=where, expected="at least two", fix=fix)
    if len(counts) > most or (len(counts) > _FEW_LABELS and len(counts) * 2 > num_rows):
        raise DataError(
            what=f"column `{column}` holds {len(counts):,} different values in {num_rows:,} rows: too many for labels",
            where=where,
            expected=f"at most {most:,} labels, each of at least two rows on average",
            fix=f"set {key}: text, name another column, or {fix}",
        )
    ways: dict[str, list[str]] = {}
    for label in counts:
        ways.setdefault(" ".join(label.split()).casefold(), []).append(label)
    alike = sorted(
        sorted(labels, key=lambda label: (-counts[label], label)) for labels in ways.values() if len(labels) > 1
    )[:_SHOWN]
    if alike:
        rows = rows_with([label for _, *others in alike for label in others], source.table[column])
        raise DataError(
            *(
                Problem(
                    what=f"column `{column}` writes one label in {1 + len(others)} ways: "
                    f"{common!r} ({format_count(counts[common], 'row')}), "
                    + ", ".join(f"{label!r} ({rows_at(rows[label], source)})" for label in others),
                    where=where,
                    expected="labels that differ in more than case and white space",
                    fix=f"write {common!r} in all of these rows",
                )
                for common, *others in alike
            )
        )


def rows_with(labels: Iterable[str], column: pa.ChunkedArray) -> dict[str, list[int]]:
    """Return the rows in which each of these labels stands."""
    rows: dict[str, list[int]] = {label: [] for label in labels}
    if rows:
        for row, text in enumerate(cell_texts(column)):
            if text.strip() in rows:
                rows[text.strip()].append(row)
    return rows


def rows_at(rows: list[int], source: Source) -> str:
    return f"{format_count(len(rows), 'row')}: {source.places(rows)}"
