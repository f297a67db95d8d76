"""Checkpoints of a run: saved whole or not at all, read only when every digest is right.

    checkpoints/step-00000042/
        model.safetensors      the weights that train
        optimizer.safetensors  the optimizer's state
        random.safetensors     the states of torch's random generators
        state.json             step, samples, tokens, best metric; the optimizer's numbers that are no tensors
        manifest.json          the SHA-256 of each file

A folder is written under a temporary name, synced and renamed. The newest two and the best one are kept; an older one
goes only after the new one has been read back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from brim.digests import MANIFEST, verified, write_manifest
from brim.errors import CheckpointError, Problem
from brim.files import remove_folder, remove_unfinished, whole_folder, writing

_STATE = "state.json"
_REQUIRED = {_STATE, "model.safetensors", "optimizer.safetensors", "random.safetensors"}
_NAME = re.compile(r"step-(\d{8,})")

TensorFiles = Mapping[str, Mapping[str, Tensor]]  # file name without ending -> tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds, on the CPU."""

    step: int
    tensors: TensorFiles
    state: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, step: int, *, tensors: TensorFiles, state: Mapping[str, Any], best_step: int | None) -> None:
        """Write a checkpoint, read it back, then delete all others but the one before it and the best one.

        Raises CheckpointError when it cannot be written; those that were there before are then still whole.
        """
        try:
            with whole_folder(self._path(step)) as folder:
                for name, content in tensors.items():
                    save_file(
                        {key: tensor.contiguous() for key, tensor in content.items()}, folder / f"{name}.safetensors"
                    )
                (folder / _STATE).write_text(json.dumps({"step": step, **state}), encoding="utf-8")
                write_manifest(folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                Problem(
                    what=f"the checkpoint of step {step} could not be written: {error}",
                    where=str(self._folder),
                    fix="make room or make the folder writable, then continue with --resume",
                )
            ) from error
        self._verify(step)
        with writing("the folder of the checkpoints", self._folder):
            before = [other for other in self.steps() if other < step]
            self._remove({*self.steps()} - {step, best_step, *before[-1:]})
            remove_unfinished(self._folder)

    def tidy(self, step: int, *, best_step: int | None) -> None:
        """Take up what was left to do when a run was killed after the checkpoint of this step had been written.

        Later ones, which were refused, stay until one takes their place.
        """
        with writing("the folder of the checkpoints", self._folder):
            upto = [other for other in self.steps() if other <= step]
            self._remove(set(upto) - {best_step, *upto[-2:]})
            remove_unfinished(self._folder)

    def load_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, with a line on each one that was refused; None where there is none at all.

        Raises CheckpointError when there are some and none is whole.
        """
        steps = self.steps()
        refused: list[str] = []
        for step in reversed(steps):
            try:
                return self.load(step), refused
            except CheckpointError as error:
                refused.append(error.problems[0].what)
        if steps:
            raise CheckpointError(
                Problem(
                    what="no whole checkpoint is left: " + "; ".join(refused),
                    where=str(self._folder),
                    fix="restore the folder from a copy, or train anew into another folder",
                )
            )
        return None, refused

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of this step. Raises CheckpointError when a file is missing or its digest is wrong."""
        names = [Path(name) for name in self._verify(step)]
        state = json.loads((self._path(step) / _STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.pop("step", None) != step:
            raise _damaged(step, self._path(step), "its state is that of another step")
        return Checkpoint(
            step=step,
            tensors={name.stem: self._tensors(step, name.stem) for name in names if name.suffix == ".safetensors"},
            state=state,
        )

    def load_tensors(self, step: int, name: str) -> dict[str, Tensor]:
        """One file's tensors of the checkpoint of this step. Raises CheckpointError as `load` does."""
        self._verify(step)
        return self._tensors(step, name)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or not, in order."""
        names = [_NAME.fullmatch(path.name) for path in self._folder.glob("step-*")]
        return sorted(int(name.group(1)) for name in names if name)

    def _verify(self, step: int) -> list[str]:
        """The names of the checkpoint's files, each of which has the digest that the manifest gives."""
        folder = self._path(step)
        try:
            names = verified(folder)
        except (OSError, ValueError) as error:
            raise _damaged(step, folder, str(error)) from error
        if not set(names) >= _REQUIRED:
            missing = ", ".join(sorted(_REQUIRED - set(names)))
            raise _damaged(step, folder, f"{MANIFEST} names no {missing}")
        return names

    def _remove(self, steps: set[int]) -> None:
        for step in sorted(steps):
            remove_folder(self._path(step))

    def _tensors(self, step: int, name: str) -> dict[str, Tensor]:
        return load_file(self._path(step) / f"{name}.safetensors")

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _damaged(step: int, folder: Path, why: str) -> CheckpointError:
    return CheckpointError(Problem(what=f"the checkpoint of step {step} is damaged ({why})", where=str(folder)))
