"""Decide which rows of a source can be used for a configuration's columns, and all that is wrong with both.

A column of mixed types is taken as the one type that most of its values have; rows with values of other types are
faulty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.config.prompts import prompt_columns
from brim.config.schema import Config, FeaturePreprocessing, OutputFeature, PreprocessingConfig, RandomSplit
from brim.config.text import KeyPath, is_within
from brim.data.read import RowFaults, Source, cell_texts
from brim.errors import DataError, Problem, problems_of
from brim.units import format_count

INPUT, OUTPUT = "input_features[0]", "output_features[0]"


def most_unasked(policy: PreprocessingConfig, num_rows: int) -> int:
    """Return how many of the rows `auto` leaves out at most."""
    return int(policy.max_dropped_fraction * num_rows + 1e-9)  # 0.29 × 100 is 29


def leaving_none_unasked(policy: PreprocessingConfig) -> PreprocessingConfig:
    """Return the policies for a prediction, which has to answer every row: under `auto`, any bad row is an error."""
    return policy.model_copy(update={"on_bad_row": "error"}) if policy.on_bad_row == "auto" else policy


def usable(source: Source, columns: Sequence[str], policy: PreprocessingConfig) -> Source:
    """Return the source with all of its rows; those that cannot be used are among its faults. Twice is as good as once.

    Where `on_bad_row` is `drop`, a row whose value in one of these columns is of another type than most is faulty, too;
    where it is `error`, using such a column is an error (see columns.py). `auto` is `drop` where such rows are
    few, else `error`.
    Raises DataError: under `error` for any faulty row, under `drop` when more than half are faulty.
    """
    num_rows, name, most = source.table.num_rows, source.name, most_unasked(policy, source.table.num_rows)
    if policy.on_bad_row != "error":
        cells = source.of_one_type(columns)
        if policy.on_bad_row == "drop" or len(cells.faults) <= most:
            RowFaults(locate=cells.locate, problems=dict(cells.faults)).require_minority(num_rows, name)
            return cells
    faults = RowFaults(locate=source.locate, problems=dict(source.faults))
    faults.settle("error", num_rows=num_rows, name=name, split_of=lambda key: None, most=most)
    return source


def wanted_columns(config: Config, *, with_answers: bool) -> dict[str, str]:
    """Return the columns that a configuration reads, each with the key that names it; the split's is left out."""
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
    """List all that is wrong with the columns and rows that a configuration asks for, not only what is found first.

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
    filled = _columns(config, wanted, there) if is_whole and only in (None, "full") else []  # of all rows
    return problems_of(
        lambda: source.require_columns(wanted),
        lambda: usable(source, there, policy) if is_known else None,
        lambda: cells.require_text(there),
        lambda: require_filled(cells, filled, cells.usable_rows()),
    )


def _cells(source: Source, columns: Sequence[str], policy: PreprocessingConfig) -> Source:
    """Return the source as it would be used, whatever else is wrong with its rows."""
    try:
        return usable(source, columns, policy)
    except DataError:
        return source.of_one_type(columns) if policy.on_bad_row == "drop" else source


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
    """Return the columns whose cells are read, with their features' rules."""
    answers = [name for name in there if wanted[name] == OUTPUT]
    inputs = input_columns(config, [name for name in there if name not in answers])
    return [*inputs, *(answer_column(config.output_features[0]) for _ in answers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Describe a column that is read: for which feature, and what happens where it is empty."""

    name: str
    feature: str  # INPUT or OUTPUT
    rule: FeaturePreprocessing
    is_label: bool = False  # for a label, an empty text is a missing one

    def texts(self, table: pa.Table) -> list[str]:
        """Return the column's cells as text, missing ones filled."""
        return cell_texts(table[self.name], fill=self.rule.fill_value)


def input_columns(config: Config, names: Sequence[str]) -> tuple[Column, ...]:
    """Return a prompt's columns, each under the rule of its input feature, or of the first where it has none."""
    numbers = {feature.column_name: number for number, feature in enumerate(config.input_features)}
    return tuple(
        Column(name=name, feature=f"input_features[{number}]", rule=config.input_features[number].preprocessing)
        for name in names
        for number in [numbers.get(name, 0)]
    )


def answer_column(target: OutputFeature) -> Column:
    """Return the answer's column under the rule of its feature."""
    is_label = target.categories is not None
    return Column(name=target.column_name, feature=OUTPUT, rule=target.preprocessing, is_label=is_label)


def require_filled(source: Source, columns: Sequence[Column], rows: npt.NDArray[np.int64]) -> None:
    """Raise DataError for each column with missing cells in these rows whose strategy is `error`."""
    problems = []
    for column in columns:
        empty = rows[source.missing(column.name, is_label=column.is_label)[rows]]
        if len(empty) and column.rule.missing_value_strategy == "error":
            count = format_count(len(empty), "row")
            problems.append(
                Problem(
                    what=f"column `{column.name}` is empty in {count}",
                    where=source.places(empty.tolist()),
                    expected="a value in every row",
                    fix=f"fill the cells, or set {column.feature}.preprocessing.missing_value_strategy "
                    "to drop_row or fill_with_const",
                )
            )
    if problems:
        raise DataError(*problems)
