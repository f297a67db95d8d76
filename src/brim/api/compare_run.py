"""One run of a comparison: trained to its end, and judged by its last weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from brim.api.compare_order import RunOrder
from brim.api.run_files import RunNotes
from brim.api.session import Say, open_session
from brim.api.training import prepared_for, train
from brim.config import load_config
from brim.data import TokenRows
from brim.train.observer import Observer
from brim.train.run_folder import RunFolder, check_run_folder


def run(order: RunOrder, *, observer: Observer, say: Say) -> dict[str, str]:
    """Train as the order says; for each split a digest of which rows it holds. Raises as `Model.train` does."""
    output, resume = Path(order.output_directory), order.resume and Path(order.output_directory).exists()
    loaded = load_config(order.config, order.overrides)
    assert loaded.config.dataset is not None, "checked before"
    check_run_folder(output, resume=resume)
    notes = RunNotes(say)
    session, source, prepared = prepared_for(
        open_session(loaded.config),
        loaded.config.dataset,
        resumed=RunFolder(output) if resume else None,
        notes=loaded.notes,
        say=notes,
    )
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
