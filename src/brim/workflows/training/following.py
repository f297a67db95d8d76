"""Train in a process that follows the first of its run: it prepares, plans and writes nothing.

What the first process has decided comes as plain JSON, in the order in which `training.train` decides it. Each process
loads the weights itself; those that train are then copied from the first, so that all begin with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brim.batching import cutter_of
from brim.config import Choice
from brim.config.schema import Config, FinetuneTrainer
from brim.data import Prepared
from brim.data.read import Ledger, Source
from brim.data.tokens import TokenRows
from brim.distributed import Ranks
from brim.errors import InputError
from brim.memory.devices import Budget, Device, budget_of, device_at_hand, enforce, settle_heap
from brim.models import LLM
from brim.planning import TrainingPlan
from brim.session import Session, Shortfall, say_nothing
from brim.storage import scratch_folder
from brim.train import Loop, Observers, RunFolder, RunLength, build_job, package_versions, stop_request
from brim.train.checkpoints import Checkpoint, CheckpointStore, TrainState, restore_weights
from brim.units import format_bytes
from brim.workflows.prediction import scorer
from brim.workflows.runs import TrainResult
from brim.workflows.training.launch import Launched
from brim.workflows.training.sharding import Loaded, loaded_for, require_places, whole_weights

_ALIKE = 0.001  # of what a process may take: processes of one machine never find quite the same


def among(ranks: Ranks, config: Config, session: Session) -> Session:
    """Return the session of one of several processes: they share a CPU's memory, or have a GPU each.

    config: as this process was given it. Raises InputError where another one was given something else, and
    ConfigError where the run cannot be sharded and is to be, and for a Ray cluster.
    """
    config.backend.require_local()
    if ranks.are_several:
        ranks.agree(dict(_keys(config.model_dump(mode="json"))))
    require_places(session.config, ranks.size)
    place = ranks.place
    sharing = place.local_world_size if session.device.type == "cpu" else place.world_size
    return replace(session, num_processes=sharing, world_size=place.world_size)


def with_least_memory(ranks: Ranks, session: Session) -> Session:
    """Return the session, in which no process is to take more than the one that may take least.

    Every process finds out what it may take. Raises ConfigError in the one that may take nothing.
    """
    if not ranks.are_several:
        return session

    def room() -> tuple[int, str]:
        _, budget = _budget_here(session)
        return budget.limit_bytes - budget.outside_bytes, budget.limit_reason

    rooms = ranks.exchanged("memory", room)
    rank = min(range(ranks.size), key=lambda each: rooms[each][0])
    least_bytes, reason = rooms[rank]
    less_bytes = rooms[ranks.rank][0] - least_bytes
    if less_bytes <= _ALIKE * least_bytes:
        return session
    why = f"rank {rank} may take {format_bytes(less_bytes)} less than rank {ranks.rank}: {reason}"
    return replace(session, shortfall=Shortfall(num_bytes=less_bytes, reason=why))


def _budget_here(session: Session) -> tuple[Device, Budget]:
    device = device_at_hand(session.device).among(session.num_processes)
    return device, budget_of(session.config.memory, device, is_at_hand=True, shortfall=session.shortfall)


def _keys(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key of a configuration, and those of its sections, with the value as JSON."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", json.dumps(value, sort_keys=True)


def prepared_by_one(
    ranks: Ranks, session: Session, prepare: Callable[[], tuple[Session, Source | None, Prepared]]
) -> tuple[Session, Source | None, Prepared]:
    """Have one process of each machine prepare the rows; the others map what it wrote.

    They get no source, no ledger and no notes, which the first process alone tells.
    """
    mine: list[tuple[Session, Source | None, Prepared]] = []
    with ExitStack() as stack:  # the folder goes, too, where another process ends before it has mapped the files

        def save() -> dict[str, Any]:
            mine.append(prepare())
            session, _, prepared = mine[0]
            folder = stack.enter_context(scratch_folder("brim-rows-"))
            for rows in prepared.splits.values():
                rows.save(folder)
            return {**sent(session), "folder": str(folder), "splits": list(prepared.splits)}

        told = ranks.local_first_does("rows", save)
        splits = {} if mine else dict(zip(told["splits"], TokenRows.mapped(Path(told["folder"])), strict=True))
        ranks.exchanged("mapped", lambda: True)  # a file that is mapped may be removed
    if mine:
        return mine[0]
    ledger = Ledger(num_rows=sum(map(len, splits.values())))
    return received(session, told), None, Prepared(splits=splits, ledger=ledger, notes=())


def sent(session: Session) -> dict[str, Any]:
    """Return a session's configuration and choices as JSON."""
    return {"config": session.config.model_dump(mode="json"), "choices": [asdict(each) for each in session.choices]}


def received(session: Session, told: Mapping[str, Any]) -> Session:
    """Return this process's session with the configuration and the choices that were sent."""
    choices = tuple(Choice(**each) for each in told["choices"])
    return replace(session, config=Config.model_validate(told["config"]), choices=choices)


def sent_launch(
    session: Session, launched: Launched, state: TrainState, checkpoint: Checkpoint | None
) -> dict[str, Any]:
    """Return what a process that follows must know of how the run was brought to the device."""
    plan = launched.plan_in_force
    return {
        **sent(session),
        "trainer": launched.request.config.model_dump(mode="json")["trainer"],
        "course": launched.request.length.course(),
        "cutter": launched.cutter.state(),
        "state": asdict(state),
        "checkpoint": None if checkpoint is None else checkpoint.step,
        "is_ample": plan is not None and plan.is_ample,
        "step_s": step_seconds(plan),
    }


def step_seconds(plan: TrainingPlan | None) -> float | None:
    """Return the predicted seconds of a step; None where they are not known."""
    return None if plan is None or not plan.total_steps else plan.least_seconds / plan.total_steps or None


def begin_together(ranks: Ranks, session: Session, prepared: Prepared, loaded: Loaded, *, step_s: float | None) -> None:
    """Begin with the same weights, once all are found to have the same rows and packages.

    step_s: the predicted seconds of a step; None where they are not known.
    """
    if not ranks.are_several:
        return
    lengths = hashlib.sha256()
    for rows in prepared.splits.values():
        lengths.update(rows.keys.tobytes() + rows.lengths.tobytes() + rows.num_supervised.tobytes())
    weights = dict(loaded.llm.model.named_parameters())
    names = [f"{name} {tuple(weight.shape)}" for name, weight in weights.items()]
    ranks.agree(
        {
            "the data set": lengths.hexdigest(),
            "the base model": hashlib.sha256("\n".join([*names, loaded.digest]).encode()).hexdigest(),
            **{f"the version of {name}": version for name, version in package_versions().items()},
        }
    )
    ranks.expect_steps_of(step_s)  # whoever ends from here on is missed soon
    for weight in weights.values():
        if weight.requires_grad and loaded.sharded is None:
            ranks.copy_from_first(weight.detach())


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Name the splits that are evaluated in a training, those that have rows."""

    during: tuple[str, ...]
    in_the_end: tuple[str, ...]
    splits: Mapping[str, TokenRows]  # all of them

    @classmethod
    def of(cls, trainer: FinetuneTrainer, prepared: Prepared) -> Evaluations:
        """Return those of a run; none where it evaluates nothing."""

        def filled(*names: str) -> tuple[str, ...]:
            return () if trainer.skip_all_evaluation else tuple(name for name in names if prepared.num_rows[name])

        during = filled(*(["train"] if trainer.evaluate_training_set else []), "validation")
        in_the_end = filled("validation", "test")
        return cls(during, in_the_end, {name: prepared.splits[name] for name in dict.fromkeys((*during, *in_the_end))})


def follow(session: Session, prepared: Prepared, run: RunFolder, ranks: Ranks) -> tuple[LLM, TrainResult]:
    """Train as the first process of the run says. Return what it returns; nothing is written."""
    session = received(session, ranks.heard("planned"))
    if not run.path.is_dir():  # the first process has made it; checkpoints are read by all
        raise InputError(
            what="this process does not see the run's folder, into which the first one writes",
            where=str(run.path.absolute()),
            expected="the same folder in all processes, on a file system that all machines share",
            fix="give each process the same --output-directory, there",
        )
    if session.config.memory.budget != "auto":
        device, budget = _budget_here(session)
        enforce(budget, device)
    loaded = loaded_for(ranks, session)
    llm, sharded = loaded.llm, loaded.sharded
    told = ranks.heard("launched")
    session = received(session, told)
    trainer = type(session.config.finetune_trainer).model_validate(told["trainer"])
    settle_heap(is_cpu=session.device.type == "cpu", is_ample=told["is_ample"])
    begin_together(ranks, session, prepared, loaded, step_s=told["step_s"])
    rows, state, evaluations = prepared.splits["train"], TrainState(**told["state"]), Evaluations.of(trainer, prepared)
    first_step, store = state.step, CheckpointStore(run.checkpoints)
    score = scorer(
        llm,
        session,
        evaluations.splits,
        beside_bytes=0,  # the first process has counted it
        say=say_nothing,
        on_smaller=lambda smaller: None,
        ranks=ranks,
        sharded=sharded,
    )
    job = build_job(
        session.config,
        trainer,
        llm,
        rows,
        length=RunLength.of(trainer, rows, seed=session.config.random_seed, course=told["course"]),
        cutter=cutter_of(told["cutter"]),
        pad_id=session.encoder.pad_id,
        evaluate=(lambda: score(evaluations.during)) if evaluations.during else None,
        store=store,
        observer=Observers([]),
        ranks=ranks,
        sharded=sharded,
    )
    loop = Loop(job, state)
    if told["checkpoint"] is not None:
        loop.restore(store.load(told["checkpoint"]), keep_cutter=False)
    started = time.perf_counter()
    with stop_request() as stop:
        loop.run(stop)
    seconds = time.perf_counter() - started
    llm.model.eval()
    best_step = ranks.heard("weights")
    if best_step is not None:
        restore_weights(llm.model, store.load_tensors(best_step, "model"))
    metrics = score(evaluations.in_the_end)
    whole_weights(ranks, llm, sharded)
    best_step = ranks.heard("exported")
    return llm, TrainResult(
        output_directory=run.path,
        num_steps=loop.state.step,
        num_new_steps=loop.state.step - first_step,
        best_step=best_step,
        metrics=metrics,
        num_rows=prepared.num_rows,
        seconds=seconds,
    )
