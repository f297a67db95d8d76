"""Finished runs that many tests read: each is trained once for the whole suite, whatever the number of workers.

A test that reads a run takes its folder from `gallery("lora")`; one that changes a run copies it first. Nothing in a run
of the gallery may change: each worker compares the digests of what it used when it ends.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from filelock import FileLock
from tests.chatml import conversation, make_chat_base

Config = dict[str, Any]
OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."
SIZES = {  # the longest first: its rule holds first
    "very large": {"type": "contains", "value": "very large"},
    "large": {"type": "regex", "value": r"\blarge\b"},
    "small": {"type": "contains", "value": "small"},
}


def usual(base: Path | str, *, trainer: Config | None = None, **changes: Any) -> Config:
    """LoRA on sums: two epochs of 28 rows, 8 an update, which are 8 steps; splits by a column."""
    return {
        "base_model": str(base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.0},
        "preprocessing": {"split": {"type": "fixed"}},
        "generation": {"max_new_tokens": 6, "do_sample": False},
        **changes,
        "trainer": {
            "type": "finetune",
            "epochs": 2,
            "effective_batch_size": 8,
            "batch_size": 4,
            "learning_rate": 0.01,
            **(trainer or {}),
        },
    }


def sums() -> list[dict[str, Any]]:
    """40 rows: a sum to learn, with a fixed split of 28, 4 and 8."""
    rows = []
    for number in range(40):
        a, b = number % 7, number % 11
        split = 0 if number % 10 < 7 else 1 if number % 10 == 7 else 2
        rows.append({"question": f"add {a} and {b} =", "answer": f" {a + b}" * (1 + number % 3), "split": split})
    return rows


def conversations() -> list[dict[str, Any]]:
    """24 conversations of one or two turns, a quarter of them to validate."""
    return [{"messages": conversation(n % 5, n % 3, turns=1 + n % 2), "split": int(n % 4 == 3)} for n in range(24)]


class Scarce:
    """Wraps a function of a model and a batch; the device holds so many rows."""

    def __init__(self, whole: Callable[..., Any], most_rows: int) -> None:
        self.whole, self.most_rows = whole, most_rows
        self.tried: list[int] = []  # rows of each call

    def __call__(self, *given: Any, **others: Any) -> Any:
        batch = given[-1]
        self.tried.append(len(batch.input_ids))
        if len(batch.input_ids) > self.most_rows:
            import torch  # here: what starts pytest anew has no use for it

            raise torch.OutOfMemoryError(OUT)
        return self.whole(*given, **others)


class stopped_after:
    """While it is entered, a run that is observed by what it returns is interrupted after a step, as by Ctrl-C."""

    def __init__(self, step: int) -> None:
        self._step, self._event = step, threading.Event()
        self._patch = patch("brim.workflows.training.training.stop_request", lambda: nullcontext(self._event))

    def __enter__(self) -> stopped_after:
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def start(self, *, first_step: int, total_steps: int, total_samples: int) -> None: ...

    def write(self, record: dict[str, Any]) -> None:
        if record["step"] == self._step:
            self._event.set()

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run of the gallery is made."""

    changes: Config = field(default_factory=dict)  # of `usual`
    rows: Callable[[], list[dict[str, Any]]] = sums
    stop_after: int | None = None  # the step after which the run is interrupted
    most_rows: int | None = None  # more rows at once are out of memory


_CHAT = {"chat": {}, "input_features": None, "output_features": None, "adapter": None}

RECIPES = {
    "lora": Recipe(),
    "full": Recipe(changes={"adapter": None}),
    "four_bit": Recipe(changes={"quantization": {"bits": 4}}),
    "stopped": Recipe(stop_after=3),
    "replayed": Recipe(changes={"trainer": {"skip_all_evaluation": True}}, most_rows=2),
    "chat": Recipe(changes={**_CHAT, "trainer": {"epochs": 6}}, rows=conversations),
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A finished run, and what it was made of."""

    run: Path
    config: Config
    data: Path  # jsonl

    @property
    def log(self) -> list[Config]:
        """Return the records of metrics.jsonl."""
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


class Gallery:
    """Hands out finished runs below a folder that all workers share."""

    def __init__(self, folder: Path, *, base: Path) -> None:
        self._folder, self._base = folder, base
        self._digests: dict[Path, str] = {}

    def __call__(self, name: str) -> Piece:
        """Return a run, trained now if no worker has done so."""
        recipe, folder = RECIPES[name], self._folder / name
        with FileLock(self._folder / f"{name}.lock"):
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                _make(recipe, folder, base=self._base)
                (folder / "made").touch()
        self._digests.setdefault(folder, _digest(folder))
        config = json.loads((folder / "config.json").read_text())
        return Piece(run=folder / "run", config=config, data=folder / "rows.jsonl")

    def check_untouched(self) -> None:
        """Fail if a test has changed a run that others read."""
        changed = [folder.name for folder, digest in self._digests.items() if _digest(folder) != digest]
        assert not changed, f"a test changed runs of the gallery: {', '.join(changed)}"


def _make(recipe: Recipe, folder: Path, *, base: Path) -> None:
    """Train a run below the folder, beside its rows and its configuration."""
    import brim
    from brim.models.loss import NextToken

    if "chat" in recipe.changes:
        base = make_chat_base(base, folder / "base")
    config = {key: value for key, value in usual(base, **recipe.changes).items() if value is not None}
    if recipe.changes.get("adapter", True) is None:
        config["adapter"] = None
    (folder / "config.json").write_text(json.dumps(config))
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in recipe.rows()))
    model, run = brim.Model(config), folder / "run"
    if recipe.stop_after is not None:
        with stopped_after(recipe.stop_after) as observer, pytest.raises(KeyboardInterrupt):
            model.train(data, output_directory=run, observer=observer, say=None)
        return
    loss = NextToken.loss
    if recipe.most_rows is not None:
        loss = Scarce(loss, recipe.most_rows)
    with patch.object(NextToken, "loss", lambda *given, **others: loss(*given, **others)):
        model.train(data, output_directory=run, say=None)


def _digest(folder: Path) -> str:
    """Return one digest of all files below a folder."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            whole.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return whole.hexdigest()
