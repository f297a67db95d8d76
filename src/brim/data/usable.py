"""Which rows of a source can be used for a configuration's columns, and all that is wrong with both."""

from __future__ import annotations

from collections.abc import Sequence

from brim.config import Config, RandomSplit
from brim.config.findings import is_within
from brim.config.places import Path
from brim.config.prompt_parts import prompt_columns
from brim.data.columns import (
    INPUT,
    OUTPUT,
    Column,
    answer_column,
    input_columns,
    require_columns,
    require_filled,
    require_text,
)
from brim.data.ledger import Entry
from brim.data.one_type import of_one_type
from brim.data.row_faults import BadRowPolicy, RowFaults, require_minority
from brim.data.source import Source
from brim.errors import Problem, problems_of


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


def wanted_columns(config: Config, *, with_answers: bool) -> dict[str, str]:
    """The columns that a configuration reads, each with the key that names it; but for that of the split."""
    if config.chat is not None:
        return {config.chat.messages: "chat.messages"} | (
            {} if config.chat.tools is None else {config.chat.tools: "chat.tools"}
        )
    template_key = "prompt.task" if config.prompt.template is None else "prompt.template"
    columns = prompt_columns(config)
    wanted = dict.fromkeys(columns, INPUT if config.prompt.template is None else template_key)
    if len(config.input_features) > 1:
        named = {each.column_name for each in config.input_features}
        wanted |= {column.name: column.feature for column in input_columns(config, columns) if column.name in named}
    return wanted | ({config.output_features[0].column_name: OUTPUT} if with_answers else {})


def data_problems(
    config: Config, source: Source, *, with_answers: bool, only: str | None = None, faulty: Sequence[Path] = ()
) -> list[Problem]:
    """All that is wrong with the columns and rows that a configuration asks for, whatever is found first.

    only: the split that is looked at, or "full" for all rows without splits.
    faulty: keys of the configuration that are wrong themselves, so that what they ask for is not known.
    """
    wanted = {
        name: who
        for name, who in wanted_columns(config, with_answers=with_answers).items()
        for keys in [_KEYS.get(who, _KEYS[INPUT])]
        if not _touches(keys, faulty) and (not faulty or keys[0][0] in config.model_fields_set)
    }
    split, policy = config.preprocessing.split, config.preprocessing.on_bad_row
    there = [name for name in wanted if name in source.table.column_names and config.chat is None]
    if only != "full" and not isinstance(split, RandomSplit) and not _touches([("preprocessing", "split")], faulty):
        wanted.setdefault(split.column, "preprocessing.split.column")
    is_known = not _touches([("preprocessing", "on_bad_row")], faulty)
    cells = of_one_type(source, there) if policy == "drop" else source
    is_whole = config.preprocessing.sample_size is None and config.preprocessing.sample_ratio == 1
    filled = _columns(config, wanted, there) if is_whole and only in (None, "full") else []  # else some rows' cells
    return problems_of(
        lambda: require_columns(source, wanted),
        lambda: usable(source, there, policy) if is_known else None,
        lambda: require_text(cells, there),
        lambda: require_filled(cells, filled, cells.usable_rows()),
    )


_KEYS: dict[str, list[Path]] = {
    INPUT: [("input_features",), ("prompt",), ("chat",)],
    "prompt.template": [("prompt",), ("input_features",), ("chat",)],
    "prompt.task": [("prompt",), ("input_features",), ("chat",)],
    OUTPUT: [("output_features",), ("chat",)],
    "chat.messages": [("chat",)],
    "chat.tools": [("chat",)],
}


def _touches(keys: Sequence[Path], faulty: Sequence[Path]) -> bool:
    return any(is_within(path, keys) or any(is_within(key, [path]) for key in keys) for path in faulty)


def _columns(config: Config, wanted: dict[str, str], there: Sequence[str]) -> list[Column]:
    """The columns whose cells are read, with their features' rules."""
    target = config.output_features[0]
    answers = [name for name in there if wanted[name] == OUTPUT]
    return [
        *input_columns(config, [name for name in there if name not in answers]),
        *(answer_column(target, name) for name in answers),
    ]
