"""Search for a batch size by brim, accelerate's decorator and Lightning's tuner, on the same step."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.search_subject import Subject
from brim.batching.memory import Prober, Search, find_batch_size, is_out_of_memory

MOST = 256  # rows that there are; where halving and the decorator begin
STEPS = 2  # of a size; the second has the optimizer's state. Lightning runs three by default


@dataclass(slots=True)
class Watched:
    """Hold the subject's step, and what came of each time that it was run."""

    subject: Subject
    sizes: list[int] = field(default_factory=list)  # one for each size that was tried, in order
    failed: list[int] = field(default_factory=list)  # those that ran out of memory
    is_new: bool = True  # the next step is the first of a size
    is_told: bool = False  # whoever runs it says when a size begins; a loader's last batch is smaller

    def step(self, rows: int, update: Callable[[torch.Tensor], None] | None = None) -> None:
        """Run it, by the subject's own update, or by this one, which is given the loss."""
        if self.is_new or (self.sizes[-1] != rows and not self.is_told):
            self.sizes.append(rows)
        self.is_new = False
        try:
            if update is None:
                self.subject.step(rows)
            else:
                update(self.subject.loss(rows))
        except Exception as error:
            if is_out_of_memory(error):
                self.failed.append(rows)
                self.is_new = True
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Hold what brim knows beforehand."""

    bytes_of: Callable[[int], float]
    limit_bytes: int
    margin_bytes: int


Contender = Callable[[Watched, Oracle, Path], int]


def contenders() -> Mapping[str, Contender]:
    """Return the contenders by name; Lightning's where it is installed."""
    found: dict[str, Contender] = {f"brim {how}": _brim(how) for how in ("predict", "linear", "binary")}
    found |= {f"brim {how}": _brim(how) for how in ("doubling", "halving")}
    found["accelerate"] = _accelerate
    if importlib.util.find_spec("lightning") is not None:
        found |= {f"Lightning {mode}": _lightning(mode) for mode in ("power", "binsearch")}
    return found


def _brim(how: Search) -> Contender:
    def find(watched: Watched, oracle: Oracle, folder: Path) -> int:
        subject = watched.subject
        fits = Prober(watched.step, model=subject.model, optimizer=subject.optimizer, device="cpu", num_steps=STEPS)
        knows = how in ("predict", "linear")
        return find_batch_size(
            fits,
            how=how,
            most=MOST,
            bytes_of=oracle.bytes_of if how == "predict" else None,
            limit_bytes=oracle.limit_bytes if knows else None,
            margin_bytes=oracle.margin_bytes if knows else 0,
        ).size

    return find


def _accelerate(watched: Watched, oracle: Oracle, folder: Path) -> int:
    from accelerate.utils import find_executable_batch_size

    def train(batch_size: int) -> int:
        for _ in range(STEPS):
            watched.step(batch_size)
        return batch_size

    size: int = find_executable_batch_size(train, starting_batch_size=MOST)()
    return size


def _lightning(mode: str) -> Contender:
    def find(watched: Watched, oracle: Oracle, folder: Path) -> int:
        import lightning
        from lightning.pytorch.tuner import Tuner

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        watched.is_told = True
        module = _lightning_module(watched)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1000,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        return int(Tuner(trainer).scale_batch_size(module, mode=mode) or 0)

    return find


def _lightning_module(watched: Watched) -> Any:
    """Return Lightning's module for the step; its class exists only where it is installed."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.automatic_optimization = False
            self.model = watched.subject.model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return watched.subject.optimizer

        def train_dataloader(self) -> Any:
            watched.is_new = True
            return torch.utils.data.DataLoader(range(MOST), batch_size=self.batch_size)  # type: ignore[arg-type]

        def training_step(self, batch: torch.Tensor, number: int) -> None:
            def update(loss: torch.Tensor) -> None:
                self.manual_backward(loss)
                watched.subject.clip()
                optimizer = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()

            watched.step(len(batch), update)

    return Module()
