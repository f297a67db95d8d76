"""Which rows of a source can be used for certain columns, as `preprocessing.on_bad_row` says."""

from __future__ import annotations

from collections.abc import Sequence

from brim.data.ledger import Entry
from brim.data.one_type import of_one_type
from brim.data.row_faults import BadRowPolicy, RowFaults, require_minority
from brim.data.source import Source


def dropped_faults(source: Source) -> list[Entry]:
    """The ledger's entries for the faulty rows of a source that is usable without them."""
    faults = RowFaults(locate=source.locate, problems=dict(source.faults))
    return faults.settle("drop", num_rows=source.table.num_rows, name=source.name, split_of=lambda key: None)


def usable(source: Source, columns: Sequence[str], policy: BadRowPolicy) -> Source:
    """The source, with all of its rows and those that cannot be used among its faults; again, it changes nothing.

    Under `drop`, a row whose value in one of these columns is of another type than most is faulty, too; under `error`,
    such a column is an error of who uses it (see columns.py).
    Raises DataError: under `error` for any faulty row, under `drop` when more than half are faulty.
    """
    num_rows, name = source.table.num_rows, source.name
    if policy == "drop":
        source = of_one_type(source, columns)
        require_minority(source.faults, source.locate, num_rows=num_rows, name=name)
    else:
        faults = RowFaults(locate=source.locate, problems=dict(source.faults))
        faults.settle(policy, num_rows=num_rows, name=name, split_of=lambda key: None)
    return source
