"""What one fresh process is asked to measure, as JSON. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brim.config import Config
from brim.memory.prediction import Phase
from brim.models.folder import ModelFolder

RowLengths = tuple[tuple[int, ...], ...]  # the tokens of each row of each step; the last step's are repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model, loaded once, and the phases to run on it."""

    config: Config
    folder: ModelFolder
    trainable: bool  # loaded to be trained
    batch_size: int  # rows of one micro-batch
    sequence_length: int  # tokens of each row that is evaluated, and of each prompt
    step_lengths: RowLengths
    num_steps: int  # of training: updates
    phases: tuple[Phase, ...]  # after loading
    device: str | None  # None: the one at hand
    records: bool  # memory over time, and the operators
    snapshot: Path | None  # where PyTorch's memory snapshot goes
    looks_for_leaks: bool = False

    def dumps(self) -> str:
        folder = asdict(self.folder)
        for name in ("path", "tokenizer_file"):
            folder[name] = None if folder[name] is None else str(folder[name])
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("config", "folder", "snapshot")}
        snapshot = None if self.snapshot is None else str(self.snapshot)
        config = self.config.model_dump(mode="json", exclude_unset=True)
        return json.dumps({**fields, "config": config, "folder": folder, "snapshot": snapshot})

    @classmethod
    def loads(cls, text: str) -> Request:
        fields: dict[str, Any] = json.loads(text)
        folder = fields["folder"]
        folder["path"] = Path(folder["path"])
        folder["tokenizer_file"] = None if folder["tokenizer_file"] is None else Path(folder["tokenizer_file"])
        snapshot = fields["snapshot"]
        return cls(
            **{
                **fields,
                "config": Config.model_validate_json(json.dumps(fields["config"])),
                "folder": ModelFolder(**folder),
                "snapshot": None if snapshot is None else Path(snapshot),
                "step_lengths": tuple(tuple(lengths) for lengths in fields["step_lengths"]),
                "phases": tuple(fields["phases"]),
            }
        )
