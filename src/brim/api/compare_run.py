"""One run of a comparison: trained to its end, and judged by its last weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from brim.api.compare_order import RunOrder
from brim.api.training import train_configuration
from brim.data import TokenRows
from brim.notes import Say
from brim.train.observer import Observer


def run(order: RunOrder, *, observer: Observer, say: Say) -> dict[str, str]:
    """Train as the order says; for each split a digest of which rows it holds. Raises as `Model.train` does."""
    output = Path(order.output_directory)
    prepared = train_configuration(
        order.config,
        order.overrides,
        output_directory=output,
        resume=order.resume and output.exists(),
        observer=observer,
        say=say,
        weights="last",
    )
    return {split: _digest(rows) for split, rows in prepared.splits.items()}


def _digest(rows: TokenRows) -> str:
    return hashlib.sha256(rows.keys.astype("<i8").tobytes()).hexdigest()
