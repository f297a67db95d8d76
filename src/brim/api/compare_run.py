"""One run of a comparison: trained to its end, and judged by its last weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from brim.api.chat import with_day_of_run
from brim.api.compare_order import RunOrder
from brim.api.run_files import RunNotes
from brim.api.session import Say, choice_notes, open_session, with_dataset, with_labels, with_rows
from brim.api.training import train
from brim.config import load_config, require_trainable
from brim.data import TokenRows, prepare, read
from brim.train.observer import Observer
from brim.train.run_folder import RunFolder, check_run_folder


def run(order: RunOrder, *, observer: Observer, say: Say) -> dict[str, str]:
    """Train as the order says; for each split a digest of which rows it holds. Raises as `Model.train` does."""
    output, resume = Path(order.output_directory), order.resume and Path(order.output_directory).exists()
    loaded = load_config(order.config, order.overrides)
    assert loaded.config.dataset is not None, "checked before"
    check_run_folder(output, resume=resume)
    session = with_dataset(open_session(loaded.config), loaded.config.dataset)
    if resume:
        session = with_day_of_run(session, RunFolder(output))
    require_trainable(session.config)
    source = read(loaded.config.dataset)
    session = with_labels(session, source)
    prepared = prepare(source, session.config, session.encoder, context_length=session.folder.context_length)
    session = with_rows(session, len(prepared.splits["train"]))
    notes = RunNotes(say)
    for line in [*loaded.notes, *choice_notes(session.choices), *prepared.notes, *prepared.ledger.summary()]:
        notes(line)
    train(
        session,
        source,
        prepared,
        output_directory=output,
        resume=resume,
        replan=False,
        observer=observer,
        say=notes,
        weights="last",
    )
    return {split: _digest(rows) for split, rows in prepared.splits.items()}


def _digest(rows: TokenRows) -> str:
    return hashlib.sha256(rows.keys.astype("<i8").tobytes()).hexdigest()
