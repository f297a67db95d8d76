"""Decide which rows of a source can be used for a configuration's columns, and all that is wrong with both.

A column of mixed types is taken as the one type that most of its values have; rows with values of other types are
faulty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from brim.config import KeyPath, is_within, prompt_columns
from brim.config.schema import Config, PreprocessingConfig, RandomSplit
from brim.data.read import (
    INPUT,
    OUTPUT,
    Column,
    Entry,
    RowFaults,
    Source,
    answer_column,
    input_columns,
    of_one_kind,
    require_columns,
    require_filled,
    require_minority,
    require_text,
)
from brim.errors import DataError, Problem, problems_of


def dropped_faults(source: Source, *, unasked: str = "") -> list[Entry]:
    """The ledger's entries for the faulty rows of a source that is usable without them. unasked: as in `settle`."""
    faults = RowFaults(locate=source.locate, problems=dict(source.faults))
    num_rows, name = source.table.num_rows, source.name
    return faults.settle("drop", num_rows=num_rows, name=name, split_of=lambda key: None, unasked=unasked)


def most_unasked(policy: PreprocessingConfig, num_rows: int) -> int:
    """Return how many of the rows are left out at most where nobody says what becomes of them."""
    return int(policy.max_dropped_fraction * num_rows + 1e-9)  # 0.29 × 100 is 29


def leaving_none_unasked(policy: PreprocessingConfig) -> PreprocessingConfig:
    """Return the policies where every row is asked for, as those of a prediction are: a few bad ones are an error."""
    return policy.model_copy(update={"on_bad_row": "error"}) if policy.on_bad_row == "auto" else policy


def usable(source: Source, columns: Sequence[str], policy: PreprocessingConfig) -> Source:
    """The source, with all of its rows and those that cannot be used among its faults; again, it changes nothing.

    Where `on_bad_row` is `drop`, a row whose value in one of these columns is of another type than most is faulty, too;
    where it is `error`, such a column is an error of who uses it (see columns.py). `auto` is `drop` where such rows are
    few, else `error`.
    Raises DataError: under `error` for any faulty row, under `drop` when more than half are faulty.
    """
    num_rows, name, most = source.table.num_rows, source.name, most_unasked(policy, source.table.num_rows)
    if policy.on_bad_row != "error":
        cells = of_one_type(source, columns)
        if policy.on_bad_row == "drop" or len(cells.faults) <= most:
            require_minority(cells.faults, cells.locate, num_rows=num_rows, name=name)
            return cells
    faults = RowFaults(locate=source.locate, problems=dict(source.faults))
    faults.settle("error", num_rows=num_rows, name=name, split_of=lambda key: None, most=most)
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
    config: Config, source: Source, *, with_answers: bool, only: str | None = None, faulty: Sequence[KeyPath] = ()
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
    split = config.preprocessing.split
    policy = config.preprocessing if with_answers else leaving_none_unasked(config.preprocessing)
    there = [name for name in wanted if name in source.table.column_names and config.chat is None]
    if only != "full" and not isinstance(split, RandomSplit) and not _touches([("preprocessing", "split")], faulty):
        wanted.setdefault(split.column, "preprocessing.split.column")
    is_known = not _touches([("preprocessing", "on_bad_row")], faulty)
    cells = _cells(source, there, policy)
    is_whole = config.preprocessing.sample_size is None and config.preprocessing.sample_ratio == 1
    filled = _columns(config, wanted, there) if is_whole and only in (None, "full") else []  # else some rows' cells
    return problems_of(
        lambda: require_columns(source, wanted),
        lambda: usable(source, there, policy) if is_known else None,
        lambda: require_text(cells, there),
        lambda: require_filled(cells, filled, cells.usable_rows()),
    )


def _cells(source: Source, columns: Sequence[str], policy: PreprocessingConfig) -> Source:
    """The source as it would be used, whatever else is wrong with its rows."""
    try:
        return usable(source, columns, policy)
    except DataError:
        return of_one_type(source, columns) if policy.on_bad_row == "drop" else source


_KEYS: dict[str, list[KeyPath]] = {
    INPUT: [("input_features",), ("prompt",), ("chat",)],
    "prompt.template": [("prompt",), ("input_features",), ("chat",)],
    "prompt.task": [("prompt",), ("input_features",), ("chat",)],
    OUTPUT: [("output_features",), ("chat",)],
    "chat.messages": [("chat",)],
    "chat.tools": [("chat",)],
}


def _touches(keys: Sequence[KeyPath], faulty: Sequence[KeyPath]) -> bool:
    return any(is_within(path, keys) or any(is_within(key, [path]) for key in keys) for path in faulty)


def _columns(config: Config, wanted: dict[str, str], there: Sequence[str]) -> list[Column]:
    """The columns whose cells are read, with their features' rules."""
    target = config.output_features[0]
    answers = [name for name in there if wanted[name] == OUTPUT]
    return [
        *input_columns(config, [name for name in there if name not in answers]),
        *(answer_column(target, name) for name in answers),
    ]


def of_one_type(source: Source, names: Sequence[str]) -> Source:
    """Return the source with those of these columns that are mixed as columns of one type.

    It is as if other rows were not there; what the cells of such a row were goes to the source's faults.
    """
    faults, table = dict(source.faults), source.table
    mixed = [name for name in dict.fromkeys(names) if name in source.kinds]
    for name in mixed:
        texts, kinds = (each.combine_chunks() for each in (table[name], source.kinds[name]))
        column = of_one_kind(name, texts, kinds, faults)
        table = table.set_column(table.column_names.index(name), *column)
    kinds_left = {name: kinds for name, kinds in source.kinds.items() if name not in mixed}
    return replace(source, table=table, faults=faults, kinds=kinds_left) if mixed else source
