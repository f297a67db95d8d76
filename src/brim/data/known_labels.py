"""Rows whose answer is no label of the category that it should be of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from brim.config import OutputFeature
from brim.config.wording import misspelt, shortened
from brim.data.row_faults import RowFaults
from brim.data.texts import Texts
from brim.errors import Problem

_SHOWN = 10  # labels in a message


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


def _unknown(label: str, labels: Sequence[str], column: str) -> Problem:
    meant = misspelt(label, labels)
    return Problem(
        what=f"column `{column}` holds the label {shortened(label)!r}, which is unknown"
        + (f" (did you mean {meant}?)" if meant else ""),
        expected=", ".join(labels[:_SHOWN]) + (f" or {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else ""),
        fix="correct the data, or give the label a rule in output_features.0.decoder.match",
    )
