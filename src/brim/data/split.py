"""Say which columns a configuration reads and all that is wrong with them; check a split's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

from brim.config.prompts import prompt_columns
from brim.config.schema import Config, FeaturePreprocessing, OutputFeature, PreprocessingConfig, RandomSplit
from brim.config.text import KeyPath, is_within
from brim.data.read import Source
from brim.data.usable import Column, leaving_none_unasked, require_filled, usable
from brim.errors import DataError, InputError, Problem, problems_of

INPUT, OUTPUT = "input_features[0]", "output_features[0]"


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


def input_columns(config: Config, names: Sequence[str]) -> tuple[Column, ...]:
    """Return a prompt's columns, each under the rule of its input feature, or of the first where it has none."""
    numbers = {feature.column_name: number for number, feature in enumerate(config.input_features)}
    return tuple(
        _column(name, f"input_features[{number}]", config.input_features[number].preprocessing)
        for name in names
        for number in [numbers.get(name, 0)]
    )


def answer_column(target: OutputFeature) -> Column:
    """Return the answer's column under the rule of its feature."""
    is_label = target.categories is not None
    return _column(target.column_name, OUTPUT, target.preprocessing, is_label=is_label)


def _column(name: str, feature: str, rule: FeaturePreprocessing, *, is_label: bool = False) -> Column:
    return Column(
        name=name,
        feature=feature,
        missing_value_strategy=rule.missing_value_strategy,
        fill_value=rule.fill_value,
        is_label=is_label,
    )


Split = Literal["train", "validation", "test", "full"]  # full: all rows


def check_split(name: str | None) -> Split | None:
    """Return a split's name as a person typed it. Raises InputError for one that does not exist."""
    if name is None or name in get_args(Split):
        return cast("Split | None", name)
    raise InputError(what=f"there is no split {name!r}", expected=", ".join(get_args(Split)))
