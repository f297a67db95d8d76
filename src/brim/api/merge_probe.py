"""The tokens on which a merged model is compared with the unmerged one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brim.api.session import Say, Session
from brim.data import Data, TokenRow, TokenRows, prepare, read
from brim.errors import DataError, InputError, Problem

# For runs whose data is gone. Prose, figures and code, since a model may have learned any of them.
_TEXT = """\
The ferry leaves the northern harbour at a quarter past seven and reaches the island before nine, unless the wind
has turned during the night. Passengers who carry bicycles board first. In March 2019 the crossing cost 12.50 euros; by
2024 the price had risen to 16.75, which is an increase of 34 per cent. Why did it rise so quickly? Fuel was one reason,
a new pier the other.

def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)

Question: A train covers 180 kilometres in two hours. How far does it travel in five hours at the same speed?
Answer: Its speed is 180 / 2 = 90 kilometres an hour, so in five hours it travels 5 * 90 = 450 kilometres.

{"name": "Ada", "year": 1843, "tags": ["notes", "engine"], "active": false}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Rows whose supervised tokens both models predict."""

    rows: TokenRows
    source: str  # in words


def probe(session: Session, dataset: Data | None, say: Say) -> Probe:
    """Validation rows of the run's data, or training rows where it has none; else a fixed text.

    dataset: another data set, of which all rows count; it must be readable, while the run's own may be gone.
    Raises DataError for a given data set that cannot be used.
    """
    if dataset is not None:
        rows = _rows(session, dataset, "full")
        if not len(rows):
            what = "the given data set has no rows to compare the merged model on"
            raise DataError(Problem(what=what, fix="give another with --dataset, or leave it out"))
        return Probe(rows=rows, source="rows of the given data set")
    if session.config.dataset is not None:
        try:
            for split, words in (("validation", "validation rows"), ("train", "training rows")):
                rows = _rows(session, session.config.dataset, split)
                if len(rows):
                    return Probe(rows=rows, source=words)
        except InputError as error:
            say(f"the run's data cannot be used to compare with: {error.problems[0].what}")
    return _fixed(session)


def _rows(session: Session, dataset: Data, split: str) -> TokenRows:
    context = session.folder.context_length
    return prepare(read(dataset), session.config, session.encoder, context_length=context, only=split).splits[split]


def _fixed(session: Session) -> Probe:
    ids = session.encoder.encode([_TEXT], special_tokens=True)[0][: session.folder.context_length]
    row = TokenRow(key=0, input_ids=np.asarray(ids, dtype=np.int32), supervised=np.ones(len(ids), dtype=np.bool_))
    return Probe(rows=TokenRows.from_rows([row]), source="a fixed text, since the run's data was not at hand")
