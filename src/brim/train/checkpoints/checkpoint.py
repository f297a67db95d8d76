"""Save checkpoints of a run whole or not at all, and read them only when every digest is right.

    checkpoints/step-00000042/
        model.safetensors      the weights that train; where ranks share them, a file of each (see parts.py)
        optimizer.safetensors  the optimizer's state
        random.safetensors     the states of torch's random generators
        state.json             step, samples, tokens, best metric; the optimizer's numbers that are not tensors
        manifest.json          the SHA-256 of each file

A folder is written under a temporary name, synced and renamed. The newest two and the best one are kept; an older one
goes only after the new one has been read back. Training waits while its state is copied, and goes on while a thread
writes the copy. `TrainState` holds all that a resumed run must know beside tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from brim.distributed import is_sharded, like, local
from brim.errors import CheckpointError
from brim.models import LLM
from brim.storage import MANIFEST, remove_folder, remove_unfinished, verified, whole_folder, write_manifest, writing
from brim.train.checkpoints.parts import contents, part_for, read

_STATE = "state.json"


_REQUIRED = {_STATE, "model.safetensors", "optimizer.safetensors", "random.safetensors"}


_NAME = re.compile(r"step-(\d{8,})")


TensorFiles = Mapping[str, Mapping[str, Tensor]]  # file name without ending -> tensors


Others = Callable[[Path], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Hold the content of a checkpoint, on the CPU."""

    step: int
    tensors: TensorFiles
    state: Mapping[str, Any]


class CheckpointStore:
    """Keep the checkpoints of one run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, step: int, *, tensors: TensorFiles, state: Mapping[str, Any], best_step: int | None, others: Others = None
    ) -> None:
        """Write a checkpoint, read it back, then delete all others but the one before it and the best one.

        others: has the other ranks write their parts into the folder; None: nothing is divided.
        Raises CheckpointError when it cannot be written; those that were there before are then still whole.
        """
        try:
            with whole_folder(self._path(step)) as folder:
                for name, content in tensors.items():
                    save_file(
                        {key: tensor.contiguous() for key, tensor in content.items()}, folder / f"{name}.safetensors"
                    )
                (folder / _STATE).write_text(json.dumps({"step": step, **state}), encoding="utf-8")
                if others is not None:
                    others(folder)
                write_manifest(folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                what=f"the checkpoint of step {step} could not be written: {error}",
                where=str(self.folder),
                fix="make room or make the folder writable, then continue with --resume",
            ) from error
        self._verify(step)
        with writing("the folder of the checkpoints", self.folder):
            before = [other for other in self.steps() if other < step]
            self._remove({*self.steps()} - {step, best_step, *before[-1:]})
            remove_unfinished(self.folder)

    def tidy(self, step: int, *, best_step: int | None) -> None:
        """Take up what was left to do when a run was killed after the checkpoint of this step had been written.

        Later ones, which were refused, stay until one takes their place.
        """
        with writing("the folder of the checkpoints", self.folder):
            upto = [other for other in self.steps() if other <= step]
            self._remove(set(upto) - {best_step, *upto[-2:]})
            remove_unfinished(self.folder)

    def load_newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest whole checkpoint, None where there is none at all, and a line on each that was refused.

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
                what="no whole checkpoint is left: " + "; ".join(refused),
                where=str(self.folder),
                fix="restore the folder from a copy, or train again into another folder",
            )
        return None, refused

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of this step. Raises CheckpointError when a file is missing or its digest is wrong."""
        names = self._verify(step)
        state = json.loads((self._path(step) / _STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.pop("step", None) != step:
            raise _damaged(step, self._path(step), "its state is that of another step")
        return Checkpoint(
            step=step,
            tensors={name: self._tensors(step, name) for name in contents(names)},
            state=state,
        )

    def load_tensors(self, step: int, name: str) -> Mapping[str, Tensor]:
        """Read the tensors of one file of the checkpoint of this step. Raises CheckpointError as `load` does."""
        self._verify(step)
        return self._tensors(step, name)

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, whole or not, in order."""
        names = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")]
        return sorted(int(name.group(1)) for name in names if name)

    def _verify(self, step: int) -> list[str]:
        """Check the digests of the manifest, and return the names of the checkpoint's files."""
        folder = self._path(step)
        try:
            names = verified(folder)
        except (OSError, ValueError) as error:
            raise _damaged(step, folder, str(error)) from error
        there = {*names, *(f"{name}.safetensors" for name in contents(names))}
        if not there >= _REQUIRED:
            missing = ", ".join(sorted(_REQUIRED - there))
            raise _damaged(step, folder, f"{MANIFEST} names no {missing}")
        return names

    def _remove(self, steps: set[int]) -> None:
        for step in sorted(steps):
            remove_folder(self._path(step))

    def _tensors(self, step: int, name: str) -> Mapping[str, Tensor]:
        return read(self._path(step), name)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


class CheckpointWriter:
    """Write the checkpoints of a run, one at a time, beside training: a thread writes a copy of the state.

    The copy's memory is kept for the next one until `close`: to get it anew takes several times as long as to copy.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._save: Callable[[], None] = lambda: None
        self._future: Future[None] | None = None

    def begin(
        self,
        step: int,
        *,
        tensors: TensorFiles,
        state: Mapping[str, Any],
        best_step: int | None,
        beside: bool,
        others: Others = None,
    ) -> None:
        """Copy the tensors and begin to write. beside: False: copy nothing; `finish` writes it before it returns.

        state: made for this checkpoint, so that training does not change it. The checkpoint before must be finished.
        """
        if beside:
            tensors = self._copied(tensors)
        else:
            self._copies.clear()
        save = partial(self._store.save, step, tensors=tensors, state=state, best_step=best_step)
        self._save = partial(save, others=others)
        if beside:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._future = thread.submit(self._save)
            thread.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Return whether the thread has ended, so that `finish` will not wait."""
        return self._future is not None and self._future.done()

    def finish(self) -> None:
        """Return once the checkpoint is written. Raises what writing it raised; called again, it writes it itself."""
        future = self._future
        if future is None:
            self._save()
            return
        wait([future])  # where that is interrupted, `close` waits
        self._future = None
        future.result()

    def close(self) -> None:
        """Wait for the thread, however the run has ended, and let go of the copies.

        Ctrl-C is heard once it has ended: a thread that goes on would write without the lock on the run's folder.
        """
        interruption = None
        while self._future is not None:
            try:
                wait([self._future])
                self._future = None
            except KeyboardInterrupt as error:
                interruption = error
        self._save = lambda: None
        self._copies.clear()
        if interruption is not None:
            raise interruption

    def _copied(self, tensors: TensorFiles) -> TensorFiles:
        """Copy tensors to the host: those of a GPU into pinned memory, where no copy waits for the one before."""
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in tensors}
        for file, of in tensors.items():
            for name, tensor in of.items():
                copy = self._copies.get((file, name))
                if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[file, name] = copies[file][name] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return copies


def _damaged(step: int, folder: Path, why: str) -> CheckpointError:
    return CheckpointError(what=f"the checkpoint of step {step} is damaged ({why})", where=str(folder))


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Count since the run's first step, over all its sessions. Saved as JSON in each checkpoint."""

    step: int = 0
    consumed_samples: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    best_step: int | None = None
    best_metric: float | None = None
    evaluations_without_improvement: int = 0
    num_skipped: int = 0  # steps that were no update, since their loss or gradient was not finite
    num_skipped_in_a_row: int = 0  # the last ones
    loss_scaler: dict[str, Any] = field(default_factory=dict)  # fp16 alone
    batch_course: dict[str, Any] = field(default_factory=dict)  # of the effective batch
    rows_digest: str = ""  # of the training and validation rows, so that a run is not continued on other data

    def counts(self) -> dict[str, int]:
        """Return the counts that each line of metrics.jsonl has."""
        return {
            "num_samples": self.consumed_samples,
            "num_tokens": self.num_tokens,
            "num_supervised_tokens": self.num_supervised_tokens,
        }

    def improve(self, metric: float, *, higher_is_better: bool) -> bool:
        """Take a validation metric, and say whether it is the best so far. NaN and infinity never are."""
        better = math.isfinite(metric) and (
            self.best_metric is None or (metric > self.best_metric if higher_is_better else metric < self.best_metric)
        )
        if better:
            self.best_metric, self.best_step, self.evaluations_without_improvement = metric, self.step, 0
        else:
            self.evaluations_without_improvement += 1
        return better


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that train, by name; tied ones once."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def restore_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into the model. Raises CheckpointError when their names are not those of the weights that train."""
    weights = trained_weights(model)
    if weights.keys() != tensors.keys():
        strange = sorted(weights.keys() ^ tensors.keys())
        raise CheckpointError(
            what=f"the checkpoint holds other weights than those that train: {', '.join(strange[:3])} …",
            expected="the versions of transformers and peft in the run's environment.json",
            fix="install those versions, or train again into another folder",
        )
    with torch.no_grad():
        for name, weight in weights.items():
            local(weight).copy_(part_for(tensors, name, weight))


def require_masks(llm: LLM, masks: str | None, *, step: int) -> None:
    """Raise CheckpointError where dropout is drawn by row, and the checkpoint's run drew it otherwise.

    masks: how it did; None where that was not said, by versions that drew from a generator for each row.
    """
    if llm.row_dropout is not None and masks != llm.row_dropout.masks:
        raise CheckpointError(
            what=f"trainer.dropout_by_row: the run of this checkpoint (step {step}) drops other elements of its rows",
            expected="the version of brim in the run's environment.json",
            fix="install that version, or train into another folder",
        )


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's state as tensors and as plain numbers, both under `<parameter>.<name>`."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    storages: set[int] = set()
    for parameter, entries in optimizer.state_dict()["state"].items():
        for name, value in _unwrapped(entries):
            key = f"{parameter}.{name}"
            if not isinstance(value, Tensor):
                numbers[key] = value
                continue
            # The tables of 8-bit numbers are one tensor in the states of all parameters; safetensors wants each apart.
            storage = local(value).untyped_storage().data_ptr()
            shared = storage in storages
            storages.add(storage)
            tensors[key] = value.clone() if shared else value
    return tensors, numbers


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Put a saved state back; the settings stay those that the optimizer was built with."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key in (*tensors, *numbers):
        parameter, name = key.split(".", 1)
        weight = weights[int(parameter)]
        if key in numbers:
            value = numbers[key]
        elif is_sharded(weight) and name != "step":
            value = like(part_for(tensors, key, weight), weight)
        else:
            value = tensors[key]
        state.setdefault(int(parameter), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    if getattr(optimizer, "is_paged", False):
        _page(optimizer)


def _unwrapped(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a parameter's state by name; bitsandbytes' optimizers keep some of it in a mapping inside."""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value


def _page(optimizer: Any) -> None:
    """Move states that have been read back into pages, where bitsandbytes made them."""
    for parameter, entries in optimizer.state.items():
        for name in ("state1", "state2"):
            if name in entries:
                page = optimizer.get_state_buffer(parameter, dtype=entries[name].dtype)
                entries[name] = page.copy_(entries[name])
