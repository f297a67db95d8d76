"""Find the labels of a category in the data, and the rows whose answer is none of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from brim.config import Choice, category_rules
from brim.config.schema import Config, OutputFeature
from brim.config.text import dotted, folded, misspelt, shortened
from brim.data.advice import Slip
from brim.data.read import RowFaults, Source
from brim.data.split import OUTPUT, data_problems
from brim.data.tokens import Texts
from brim.data.usable import counted, require_labels, rows_at, rows_with, usable, without_faulty
from brim.errors import ConfigError, DataError, Problem
from brim.notes import warning
from brim.units import format_count

MOST_LABELS = 1000


_SHOWN = 10  # labels in a message


_MANY_TIMES = 10  # a label has at least so many times the rows of its misspelling


_MATCH = "output_features.0.decoder.match"


_VOCAB = "output_features.0.preprocessing.vocab"


_FALLBACK = "output_features.0.preprocessing.fallback_label"


_NAME_THEM = f"name the labels in {_VOCAB}, such as [positive, negative], or give each a rule in {_MATCH}"


def lacks_labels(config: Config) -> bool:
    """Return whether the answer is a category whose labels are to come from the data."""
    feature = config.output_features[0]
    return config.chat is None and feature.categories is not None and not feature.rules


def with_labels_of_data(config: Config, source: Source) -> tuple[Config, tuple[Choice, ...]]:
    """Put the labels of the data into a configuration whose category names none; return what was chosen.

    They are all values of the answer's column, in alphabetical order.
    Raises DataError: no such column; fewer than two labels; more than MOST_LABELS, or too many for the number of rows;
    labels that differ in case or white space alone. Raises ConfigError for labels that no rule could tell apart.
    """
    if not lacks_labels(config):
        return config, ()
    feature = config.output_features[0]
    name = feature.column_name
    if name not in source.table.column_names:
        try:
            source.require_columns({name: OUTPUT})
        except DataError as error:
            (problem,) = error.problems
            what = f"the labels of `{feature.name}` are not known: {problem.what}, and {_MATCH} is not given"
            fix = f"{_NAME_THEM}; or take a data set with the column, or the folder of a run, which knows its labels"
            fix = problem.fix if misspelt(name, source.table.column_names) else fix
            unknown = Problem(what=what, where=source.name, expected=problem.expected, fix=fix)
            raise DataError(unknown, *data_problems(config, source, with_answers=False)) from None
    try:
        source = usable(source, [name], config.preprocessing)
        source.require_text([name])
    except DataError:  # report all that is wrong, not the first problem alone
        raise DataError(*data_problems(config, source, with_answers=True)) from None
    counts = counted(source.table[name])
    require_labels(counts, name, source, most=MOST_LABELS, fix=_NAME_THEM, key="output_features.0.type")
    labels = tuple(sorted(counts, key=lambda label: (label.casefold(), label)))
    fallback = feature.fallback_label or max(labels, key=lambda label: counts[label])
    preprocessing = feature.preprocessing.model_copy(update={"fallback_label": fallback})
    matched = feature.model_copy(update={"preprocessing": preprocessing}).with_labels_matched(labels)
    config = config.model_copy(update={"output_features": (matched,)})
    ConfigError.raise_for(
        Problem(what=found.what, where=dotted(found.path), fix=f"rename a label in the data, or {_NAME_THEM}")
        for found in category_rules(config)
    )
    return config, _choices(feature, labels, fallback, num_rows=counts[fallback])


def label_slips(config: Config, source: Source) -> list[Slip]:
    """Return labels of the data that are probably misspelt: one of ten times as many rows differs by a letter.

    Labels that differ in digits or in a word of one or two letters are left alone: `level 1` and `level 2`, `class a`.
    """
    if not lacks_labels(config):
        return []
    name = config.output_features[0].column_name
    column = usable(source, [name], config.preprocessing).table[name]
    counts = counted(column)
    near: dict[str, set[str]] = {}
    for label in counts:
        for text in _without_a_letter(label):
            near.setdefault(text, set()).add(label)
    found = {}
    for label, count in counts.items():
        alike = sorted(set[str]().union(*(near[text] for text in _without_a_letter(label))))
        common = [other for other in alike if counts[other] >= _MANY_TIMES * count and not _is_numbered(label, other)]
        meant = misspelt(label, common, at_most=1)
        if meant is not None:
            found[label] = meant
    rows = rows_with(found, column)
    slips = [
        Slip(label=label, meant=meant, rows=rows[label], num_meant=counts[meant]) for label, meant in found.items()
    ]
    return sorted(slips, key=lambda slip: slip.rows)


def slip_notes(config: Config, source: Source) -> list[str]:
    """Return the labels of `label_slips` as one note for a person who trains."""
    slips = label_slips(config, source)
    if not slips:
        return []
    listed = "; ".join(
        f"{slip.label!r} ({rows_at(slip.rows, source)}) beside {slip.meant!r} ({slip.num_meant:,} rows)"
        for slip in slips[:_SHOWN]
    )
    more = f"; and {len(slips) - _SHOWN:,} more, which `brim check` names" if len(slips) > _SHOWN else ""
    what = "a label of its own is probably misspelt" if len(slips) == 1 else "labels of their own are probably misspelt"
    return [warning(f"{what}: {listed}{more}; correct the data, or name the labels in {_VOCAB}", topic="rows")]


def _without_a_letter(label: str) -> set[str]:
    """Return the label, and what is left without each of its letters: a label and its slip share one of these."""
    plain = folded(label)
    return {plain, *(plain[:at] + plain[at + 1 :] for at in range(len(plain)))}


def _is_numbered(label: str, other: str) -> bool:
    """Return whether two labels differ in digits, or in words of one or two letters: those mean different things."""
    if _DIGITS.sub("", label) == _DIGITS.sub("", other):
        return True
    words, others = label.split(), other.split()
    if len(words) != len(others):
        return False
    return all(max(len(a), len(b)) < 3 for a, b in zip(words, others, strict=True) if a != b)


_DIGITS = re.compile(r"\d+")


def with_known_labels(texts: Iterable[Texts], feature: OutputFeature, faults: RowFaults) -> Iterator[Texts]:
    """Give the texts without rows of unknown labels, which are added to the faults; all where answers are texts.

    As in Ludwig, white space around a label does not count.
    """
    labels = feature.labels
    known = frozenset(labels)

    def problem(batch: Texts, number: int) -> Problem | None:
        label = batch.answers[number].strip() if batch.answers else None
        return None if label is None or label in known else _unknown(label, labels, feature.column_name)

    return without_faulty(texts, faults, problem) if known else iter(texts)


def _choices(feature: OutputFeature, labels: Sequence[str], fallback: str, *, num_rows: int) -> tuple[Choice, ...]:
    values = f"the values of column `{feature.column_name}`: {_listed(labels)}"
    chosen = [Choice(key=_MATCH, value=f"{len(labels)} labels", reason=values)]
    if feature.fallback_label is None:
        reason = f"the most frequent label, of {format_count(num_rows, 'row')}"
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
