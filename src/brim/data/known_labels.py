"""The labels of a category in the data: which they are, and rows whose answer is none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from brim.config import Choice, Config, OutputFeature
from brim.config.category_rules import category_rules
from brim.config.completed import with_labels_matched
from brim.config.places import dotted
from brim.config.wording import misspelt, shortened
from brim.data.columns import OUTPUT, require_columns, require_text
from brim.data.prompt import cell_texts
from brim.data.row_faults import RowFaults
from brim.data.source import Source
from brim.data.texts import Texts
from brim.data.usable import data_problems, usable
from brim.errors import ConfigError, DataError, Problem

MOST_LABELS = 1000
_FEW_LABELS = 20  # which may be each of one row
_SHOWN = 10  # labels in a message
_MATCH = "output_features.0.decoder.match"
_VOCAB = "output_features.0.preprocessing.vocab"
_FALLBACK = "output_features.0.preprocessing.fallback_label"
_NAME_THEM = f"name the labels in {_VOCAB}, such as [positive, negative], or give each a rule in {_MATCH}"


def lacks_labels(config: Config) -> bool:
    """Whether the answer is a category whose labels are to come from the data."""
    feature = config.output_features[0]
    return config.chat is None and feature.categories is not None and not feature.rules


def with_labels_of_data(config: Config, source: Source) -> tuple[Config, tuple[Choice, ...]]:
    """The configuration with the labels of its category, where they are to come from the data, and what was chosen.

    They are all values of the answer's column, in alphabetical order.
    Raises DataError: no such column; fewer than two labels; more than MOST_LABELS, or so many that they are no labels;
    labels that differ in case or white space alone. Raises ConfigError for labels that no rule could tell apart.
    """
    if not lacks_labels(config):
        return config, ()
    feature = config.output_features[0]
    name = feature.column_name
    if name not in source.table.column_names:
        try:
            require_columns(source, {name: OUTPUT})
        except DataError as error:
            (problem,) = error.problems
            what = f"the labels of `{feature.name}` are not known: {problem.what}, and {_MATCH} is not given"
            fix = f"{_NAME_THEM}; or take a data set with the column, or the folder of a run, which knows its labels"
            fix = problem.fix if misspelt(name, source.table.column_names) else fix
            unknown = Problem(what=what, where=source.name, expected=problem.expected, fix=fix)
            raise DataError(unknown, *data_problems(config, source, with_answers=False)) from None
    try:
        source = usable(source, [name], config.preprocessing)
        require_text(source, [name])
    except DataError:  # and what else is wrong
        raise DataError(*data_problems(config, source, with_answers=True)) from None
    counts = _counted(source.table[name])
    _require_labels(counts, name, source.name)
    labels = tuple(sorted(counts, key=lambda label: (label.casefold(), label)))
    fallback = feature.fallback_label or max(labels, key=lambda label: counts[label])
    preprocessing = feature.preprocessing.model_copy(update={"fallback_label": fallback})
    matched = with_labels_matched(feature.model_copy(update={"preprocessing": preprocessing}), labels)
    config = config.model_copy(update={"output_features": (matched,)})
    faults = [
        Problem(what=found.what, where=dotted(found.path), fix=f"rename a label in the data, or {_NAME_THEM}")
        for found in category_rules(config)
    ]
    if faults:
        raise ConfigError(*faults)
    return config, _choices(feature, labels, fallback, num_rows=counts[fallback])


def with_known_labels(texts: Iterable[Texts], feature: OutputFeature, faults: RowFaults) -> Iterator[Texts]:
    """The texts without rows of unknown labels, which are added to the faults; all of them, where answers are texts.

    As in Ludwig, white space around a label does not count.
    """
    labels = feature.labels
    known = frozenset(labels)
    for batch in texts:
        if not known or not batch.answers:
            yield batch
            continue
        keep = []
        for number, answer in enumerate(batch.answers):
            if answer.strip() in known:
                keep.append(number)
            else:
                faults.add(int(batch.keys[number]), _unknown(answer.strip(), labels, feature.column_name))
        if keep:
            yield batch.only(keep)


def _counted(column: pa.ChunkedArray) -> Counter[str]:
    """How many rows have each value, white space around it aside; empty ones are no label."""
    counts: Counter[str] = Counter()
    found = pc.value_counts(column)
    values = cell_texts(pa.chunked_array([found.field("values")]))
    for value, count in zip(values, found.field("counts").to_pylist(), strict=True):
        if value.strip():
            counts[value.strip()] += count
    return counts


def _require_labels(counts: Counter[str], column: str, where: str) -> None:
    num_rows = counts.total()
    if len(counts) < 2:
        what = f"column `{column}` holds {len(counts)} label{'' if len(counts) == 1 else 's'}"
        raise DataError(Problem(what=what, where=where, expected="at least two", fix=_NAME_THEM))
    if len(counts) > MOST_LABELS or (len(counts) > _FEW_LABELS and len(counts) * 2 > num_rows):
        raise DataError(
            Problem(
                what=f"column `{column}` holds {len(counts):,} different values in {num_rows:,} rows: no labels",
                where=where,
                expected=f"at most {MOST_LABELS:,} labels, each of at least two rows on average",
                fix=f"set output_features.0.type: text, name another column, or {_NAME_THEM}",
            )
        )
    ways: dict[str, list[str]] = {}
    for label in counts:
        ways.setdefault(" ".join(label.split()).casefold(), []).append(label)
    alike = [sorted(labels) for labels in ways.values() if len(labels) > 1]
    if alike:
        raise DataError(
            *(
                Problem(
                    what=f"column `{column}` writes one label in {len(labels)} ways: "
                    + ", ".join(f"{label!r} ({counts[label]:,} {_rows(counts[label])})" for label in labels),
                    where=where,
                    expected="labels that differ in more than case and white space",
                    fix="write it the same in all rows",
                )
                for labels in sorted(alike)[:_SHOWN]
            )
        )


def _choices(feature: OutputFeature, labels: Sequence[str], fallback: str, *, num_rows: int) -> tuple[Choice, ...]:
    values = f"the values of column `{feature.column_name}`: {_listed(labels)}"
    chosen = [Choice(key=_MATCH, value=f"{len(labels)} labels", reason=values)]
    if feature.fallback_label is None:
        reason = f"the most frequent label, of {num_rows:,} {_rows(num_rows)}"
        chosen.append(Choice(key=_FALLBACK, value=fallback, reason=reason))
    return tuple(chosen)


def _unknown(label: str, labels: Sequence[str], column: str) -> Problem:
    meant = misspelt(label, labels)
    return Problem(
        what=f"column `{column}` holds the label {shortened(label)!r}, which is unknown"
        + (f" (did you mean {meant}?)" if meant else ""),
        expected=_listed(labels),
        fix="correct the data, or give the label a rule in output_features.0.decoder.match",
    )


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:_SHOWN]) + (f" or {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else "")


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"
