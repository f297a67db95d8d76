"""What a run's folder holds beside its logs and weights: configuration, plan, environment, ledger and model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import brim
from brim.api.resuming import in_order
from brim.api.session import Say, Session
from brim.config import Config, dump, mask_text
from brim.data import Prepared, Source
from brim.files import write_text, writing
from brim.models.device import device_name
from brim.notes import Note, is_told
from brim.train.card import CardFacts, model_card
from brim.train.checkpoint import Checkpoint
from brim.train.length import RunLength
from brim.train.run_folder import RunFolder, write_environment
from brim.train.state import TrainState


def write_head(
    run: RunFolder,
    session: Session,
    prepared: Prepared,
    length: RunLength,
    planned: Mapping[str, Any],
    *,
    checkpoint: Checkpoint | None,
) -> None:
    """What the folder holds from the start on."""
    rows = prepared.splits["train"]
    plan = {
        "total_steps": length.total_steps,
        "total_samples": length.total_samples,
        "batch_schedule": [asdict(phase) for phase in length.schedule.phases],
        "tokens_per_epoch": int(rows.lengths.sum()),
        "supervised_tokens_per_epoch": int(rows.num_supervised.sum()),
        "rows": {split: len(split_rows) for split, split_rows in prepared.splits.items()},
        **planned,
        "choices": [{"key": c.key, "value": c.value, "reason": c.reason} for c in in_order(session.choices)],
    }
    _write(run.plan, json.dumps(plan, indent=1) + "\n")
    _write(run.config, dump(session.config))
    if checkpoint is None or not run.environment.exists():
        with writing(run.environment.name, run.environment):
            write_environment(run, device=device_name(session.device))
    prepared.ledger.write(run.ledger)


def write_card(
    run: RunFolder,
    session: Session,
    source: Source,
    *,
    rows: Mapping[str, int],
    metrics: Mapping[str, Mapping[str, float]],
    state: TrainState,
) -> None:
    """The model card. rows: of each split. metrics: of the splits that were evaluated in the end."""
    facts = CardFacts(
        base_model=session.folder.name,
        dataset=Path(source.name).name,
        rows=rows,
        metrics=metrics,
        state=state,
        version=brim.__version__,
    )
    _write(run.card, model_card(session.config, facts))


def with_trained_weights(config: Config, run: RunFolder) -> Config:
    """Return a run's configuration with what it has learned in place of what it started from.

    One that has no adapter, of a run that trained one, asks for the base model: it is returned as it is.
    """
    weights, adapter = str(run.model.resolve()), config.adapter
    if not (run.model / "adapter_config.json").is_file():
        return config.model_copy(update={"base_model": weights, "initialize": "pretrained"})
    if adapter is None:
        return config
    trained = adapter.model_copy(update={"pretrained_adapter_weights": weights})
    return config.model_copy(update={"adapter": trained})


class RunNotes:
    """Passes on what is said, and keeps every note in the run's folder, whatever is shown of it."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said: list[str] = []
        self._path: Path | None = None

    def __call__(self, line: str) -> None:
        self._say(line)
        if is_told(line):
            self._said.append(line)
            self._append()

    def keep_in(self, run: RunFolder, *, step: int) -> None:
        """Write what was said so far, and from now on each note; those of an earlier start stay above."""
        begins = f"after step {step:,}" if step else "from the start"
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._said.insert(0, f"# brim {brim.__version__}, {now}, {begins}")
        self._path = run.notes
        self._append()
        self._say(Note(str(run.notes), kind="rest"))

    def _append(self) -> None:
        if self._path is None:
            return
        with writing(self._path.name, self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{mask_text(line)}\n" for line in self._said)
        self._said = []


def _write(path: Path, text: str) -> None:
    with writing(path.name, path):
        write_text(path, text)
