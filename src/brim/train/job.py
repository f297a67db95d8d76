"""Build all that a training run is made of from a resolved configuration, a model and its rows.

The model that a run ends with is written as PEFT and transformers open it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from brim.batching import Cutter
from brim.batching.memory import or_explain, second_try
from brim.config.schema import Config, FinetuneTrainer, GradientClippingConfig
from brim.data.chat import TemplateTexts, store_template
from brim.data.tokens import TokenRows
from brim.distributed import ALONE, Ranks, Sharded
from brim.errors import CheckpointError, OutOfMemoryError
from brim.models import LLM, no_library_bars, no_library_warnings
from brim.storage import whole_folder, write_manifest
from brim.train.checkpoints import CheckpointStore, TrainState
from brim.train.figures import Observer
from brim.train.optimizer import (
    FixedBetas,
    LearningRate,
    MovingBeta2,
    build_host_optimizer,
    build_optimizer,
    update_rates,
)
from brim.train.schedule import RunLength

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
)


@no_library_warnings()
def export_model(
    llm: LLM,
    path: Path,
    *,
    generation: Mapping[str, Any],
    chat: TemplateTexts | None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the adapter (PEFT's format) or the full model (transformers'), tokenizer, chat template, generation config.

    generation: of transformers' GenerationConfig. chat: the template that was used; None: the base's own.
    weights: whole ones, by their names in the model, where it has parts of them alone; None: the model's own.
    Raises CheckpointError when the folder cannot be written, OutOfMemoryError when memory runs out twice.
    """

    def write() -> None:
        try:
            second_try(lambda: _export(llm, path, generation=generation, chat=chat, weights=weights))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                what=f"the model could not be written: {error}",
                where=str(path),
                fix="make room or make the folder writable, then run again with --resume",
            ) from error

    or_explain(
        write,
        lambda message: OutOfMemoryError(
            what=f"memory ran out twice when the model was written: {message}",
            where=str(path),
            fix="free memory on this machine, then run again with --resume: what was learned is in the checkpoints",
        ),
    )


def _export(
    llm: LLM,
    path: Path,
    *,
    generation: Mapping[str, Any],
    chat: TemplateTexts | None,
    weights: Mapping[str, Tensor] | None,
) -> None:
    from transformers import GenerationConfig

    with whole_folder(path) as folder, no_library_bars():
        given: dict[str, Any] = {} if weights is None else {"state_dict": dict(weights)}
        llm.model.save_pretrained(str(folder), **given)
        GenerationConfig(**generation).save_pretrained(str(folder))
        for name in _TOKENIZER_FILES:
            if (llm.folder.path / name).exists():
                shutil.copyfile(llm.folder.path / name, folder / name)
        if chat is not None:
            store_template(chat, folder)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form; the run's own card stands beside
        write_manifest(folder)


# A measured step takes about 1.6 times another (benchmarks/noise_scale.py); once in ten steps that is 6%.
MEASURED_EVERY = 10


def build_job(
    config: Config,
    trainer: FinetuneTrainer,
    llm: LLM,
    rows: TokenRows,
    *,
    length: RunLength,
    cutter: Cutter,
    pad_id: int,
    evaluate: Evaluate | None,
    store: CheckpointStore,
    observer: Observer,
    sync_logs: SyncLogs = dict,
    copy_room_bytes: int = 0,
    ranks: Ranks = ALONE,
    sharded: Sharded | None = None,
) -> TrainJob:
    """Build the job that a resolved configuration asks for."""
    learning = [weight for weight in llm.model.parameters() if weight.requires_grad]
    if config.memory.offload == "optimizer":
        optimizer = build_host_optimizer(trainer.optimizer, learning)
    else:
        is_offloaded = sharded is not None and sharded.offloads
        optimizer = build_optimizer(trainer.optimizer, learning, is_offloaded=is_offloaded)
    return TrainJob(
        llm=llm,
        rows=rows,
        pad_id=pad_id,
        optimizer=optimizer,
        rates=update_rates(trainer, optimizer, final_size=length.schedule.final_size),
        learning_rate=LearningRate.of(trainer, rows, length, seed=config.random_seed),
        length=length,
        measure_every=measure_every(trainer),
        cutter=cutter,
        clipping=trainer.gradient_clipping,
        on_nonfinite=trainer.on_nonfinite,
        seed=config.random_seed,
        evaluate=evaluate,
        stopping=stopping_of(trainer),
        store=store,
        observer=observer,
        sync_logs=sync_logs,
        copy_room_bytes=copy_room_bytes,
        ranks=ranks,
        sharded=sharded,
        claims=config.backend.trainer.dealing == "claimed",
        settings=config.model_dump(mode="json"),
    )


def stopping_of(trainer: FinetuneTrainer) -> Stopping:
    """Return the rule by which evaluations end the run."""
    metric = trainer.validation_metric or "loss"
    return Stopping(metric=metric, higher_is_better=metric.endswith("accuracy"), patience=trainer.early_stop)


def measure_every(trainer: FinetuneTrainer) -> int | None:
    """Return the steps between measurements of the gradient's noise; None: it is not asked for."""
    if trainer.noise_scale_every is not None or trainer.batch_adaptation is None:
        return trainer.noise_scale_every
    return MEASURED_EVERY


Metrics: TypeAlias = Mapping[str, float]


Evaluate: TypeAlias = Callable[[], Mapping[str, Metrics]]  # split -> its metrics


SyncLogs: TypeAlias = Callable[[], Mapping[str, Any]]  # puts the logs on the disk; their marks, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Name the validation metric that counts, and the evaluations without improvement that end the run."""

    metric: str = "loss"
    higher_is_better: bool = False
    patience: int = -1  # evaluations; -1: never

    def is_over(self, state: TrainState) -> bool:
        return 0 <= self.patience <= state.evaluations_without_improvement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Hold what the loop runs. Model, optimizer, rates and cutter change; their state is in the checkpoints."""

    llm: LLM
    rows: TokenRows
    pad_id: int
    optimizer: Optimizer
    rates: FixedBetas | MovingBeta2  # of the optimizer
    learning_rate: LearningRate
    length: RunLength
    measure_every: int | None = None  # steps between measurements of the gradient's noise; None: never
    cutter: Cutter
    clipping: GradientClippingConfig | None
    on_nonfinite: Literal["stop", "skip"]
    seed: int
    evaluate: Evaluate | None
    stopping: Stopping
    store: CheckpointStore
    observer: Observer
    sync_logs: SyncLogs = dict  # before a checkpoint is written, which a resumed run goes by
    copy_room_bytes: int = 0  # of the host's memory, for a copy of the state that is written beside training
    ranks: Ranks = ALONE  # the processes that train together; the first alone writes
    sharded: Sharded | None = None  # the model, over these processes; None: each has all of it
    claims: bool = False  # who is free takes the next micro-batch
    settings: Mapping[str, Any] = field(default_factory=dict)  # kept with each checkpoint, as JSON

    @property
    def in_lockstep(self) -> bool:
        """Return whether several processes go through the model together, so that none can repeat a pass alone."""
        return self.sharded is not None and self.ranks.are_several
