"""Plan how a configuration trains with a data set: before anything is loaded (`brim.plan`), or for a run.

A run's batches are partitioned as they were planned when it began, or as they are planned now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brim.batching import Cutter, cutter_of
from brim.config import Choice, Resolution, bounded_by_rows, is_sized_by_memory, load_config, with_effective_rows
from brim.config.schema import Config, FinetuneTrainer
from brim.data import Prepared, prepare, slip_notes, with_labels_of_data
from brim.data.chat import settled_day
from brim.data.read import Data, read
from brim.data.tokens import TokenRows, load_encoder
from brim.distributed import Place
from brim.errors import ConfigError, InputError
from brim.memory import (
    MOST_GPUS,
    MOST_MADE_UP,
    MOST_TOKENS,
    Asked,
    UntraceableError,
    ask,
    require_in_context,
    require_whole,
)
from brim.memory.devices import settle_heap
from brim.models import LLM, model_note, no_library_warnings
from brim.notes import Note, Say, planned, planned as planned_line, status, warning
from brim.planning import PlanRequest, TrainingPlan, keep, plan_run, short_plan, too_long
from brim.report import listening, show
from brim.session import Session, choice_notes, with_choices, with_length_of_labels
from brim.train import RunFolder, RunLength
from brim.train.checkpoints import Checkpoint
from brim.units import format_count
from brim.workflows.runs import read_json
from brim.workflows.training.launch import Launched, launch, room_for_copy, saving_note, untried
from brim.workflows.training.resuming import begun_otherwise, with_plan_of
from brim.workflows.training.sharding import (
    nothing_saved,
    require_host_room,
    require_places,
)


@no_library_warnings()
def plan(
    config: str | Path | Mapping[str, Any] | Config,
    dataset: Data | None = None,
    *,
    num_rows: int | None = None,
    sequence_length: int | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    memory_bytes: int | None = None,
    gpus: int | None = None,
    replan: bool = False,
    say: Say | None = show,
) -> TrainingPlan:
    """Plan what `brim train` would decide: micro-batches, memory and time of each strategy, and the one that is chosen.

    Reads the tokenizer, the base model's config.json and the data; loads no weights. dataset: default: the key
    `dataset`. num_rows, sequence_length: instead of data, so many rows to train on, each of so many tokens; then
    config.json alone is read. device: a name of the catalogue, or "cpu"; memory_bytes: of any other GPU; neither: the
    local device. gpus: so many of them that train together, or processes on a CPU; None: as backend.trainer.num_workers
    says. replan: do not use what earlier plans found out. say: see docs/python.md.

    Raises ConfigError, DataError, ModelError and InputError, but not for rows that do not fit: the plan names them, and
    `chosen` is None.
    """
    loaded = load_config(config.model_dump(exclude_unset=True) if isinstance(config, Config) else config, overrides)
    _require_training(loaded.config)
    loaded.config.backend.require_local()
    data = dataset if dataset is not None else loaded.config.dataset
    _require_rows(num_rows, sequence_length, has_dataset=dataset is not None, has_data=data is not None)
    ranks = PlanRequest.ranks_asked(loaded.config) if gpus is None else gpus
    require_whole("gpus", ranks, most=MOST_GPUS)
    if device is None and memory_bytes is None and not torch.cuda.is_available():
        device = "cpu"
    with listening(say) as told:
        asked = ask(loaded.config, phase="train", device=device, memory_bytes=memory_bytes)
        require_places(asked.config, ranks)
        if loaded.config.trainer.packing == "auto" and asked.device.is_cpu:
            asked = asked.reopened(_LAYOUT)
        if num_rows is not None and sequence_length is not None:
            require_in_context(asked, sequence_length)
            rows = TokenRows.of_lengths(np.full(num_rows, sequence_length))
            made_up = f"{format_count(num_rows, 'row')} of {sequence_length:,} tokens"
            unread = f"dataset: {data} is not read; the plan is of {made_up}"
            notes = [planned("data", made_up), *([] if data is None else [unread])]
        else:
            assert data is not None, "required above"
            told(status("reading the data"))
            asked, rows, notes = _prepared(asked, data)
        devices = f"{ranks} × {asked.device.name}" if ranks > 1 else asked.device.name
        told(model_note(asked.config, devices, trains=True))
        settled, choices = bounded_by_rows(asked.config, asked.choices, len(rows))
        for line in [*loaded.notes, *choice_notes(choices), *notes]:
            told(line)
        request = _request(
            settled,
            rows,
            folder=asked.folder,
            architecture=asked.architecture,
            device=asked.device.among(ranks),
            ranks=ranks,
            is_at_hand=device in (None, "cpu") and memory_bytes is None,
        )
        found = plan_run(request, every_way=True, replan=replan, say=told)
        if request.is_at_hand:
            require_host_room(found.plan, num_processes=ranks)
        for line in choice_notes([choice for choice in found.choices if choice.key == _LAYOUT]):
            told(line)
        return replace(found.plan, advice=(*found.plan.advice, *_as_of_now(found.plan, found.request)))


def _as_of_now(plan: TrainingPlan, request: PlanRequest) -> Iterator[str]:
    """Say that the run may choose another effective batch, where free memory alone bounds it.

    On a CPU what the process itself takes counts, and the one that trains takes more than the one that plans; so does
    the copy that is made of a checkpoint.
    """
    if request.offload != "none" and request.device.is_cpu:
        yield nothing_saved(request.config)
    if request.offload != "weights" and plan.chosen is not None and request.device.is_cpu:
        yield saving_note(plan, room_for_copy(plan, is_cpu=True))
    size = plan.effective_batch_size
    most = min(len(request.rows), request.trainer.max_batch_size or len(request.rows))
    if request.is_sized_by_memory and plan.chosen is not None and size < most:
        yield (
            "the run chooses the largest batch when it starts, by the memory that is free then, and may take a row "
            f"more or fewer than {size:,}; trainer.effective_batch_size={size} fixes the number"
        )


def request_of(session: Session, prepared: Prepared, *, course: Mapping[str, Any] | None = None) -> PlanRequest:
    """Return what a run that is about to start here asks of its plan.

    course: of the effective batch, as the run's checkpoint has it; None for a new run.
    Raises InputError where trainer.batch_increase_function cannot be used.
    """
    return _request(session.config, prepared.splits["train"], course=course, **PlanRequest.at_hand(session))


def _request(config: Config, rows: TokenRows, *, course: Mapping[str, Any] | None = None, **where: Any) -> PlanRequest:
    """Return the request of a run over these rows; with its largest batch, where the memory is to size it.

    where: the model and the device, by PlanRequest's names.
    """
    trainer = config.finetune_trainer
    is_open = is_sized_by_memory(trainer)
    if is_open:
        config = with_effective_rows(config, min(len(rows), trainer.max_batch_size or len(rows)))
    return PlanRequest(
        **where,
        config=config,
        rows=rows,
        length=RunLength.of(config.finetune_trainer, rows, seed=config.random_seed, course=course),
        has_begun=course is not None,
        is_sized_by_memory=is_open,
    )


def _prepared(asked: Asked, data: Data) -> tuple[Asked, TokenRows, list[str]]:
    """Return what is asked with the day of its chat and its labels settled, the rows to train on, and notes."""
    encoder = load_encoder(asked.folder, trust_remote_code=asked.config.trust_remote_code)
    chat, _ = settled_day(asked.config.chat, encoder)
    source = read(data)
    config, labels = with_labels_of_data(asked.config.model_copy(update={"chat": chat}), source)
    settled = with_length_of_labels(Resolution(config=config, choices=(*asked.choices, *labels)), encoder)
    prepared = prepare(source, settled.config, encoder, context_length=asked.folder.context_length)
    notes = [rows_note(prepared), *slip_notes(asked.config, source), *prepared.notes, *prepared.ledger.summary()]
    asked = replace(asked, config=settled.config, choices=settled.choices)
    return asked, prepared.splits["train"], notes


def rows_note(prepared: Prepared) -> Note:
    """Say how many rows and tokens there are to learn from, and how many rows the other splits have."""
    rows = prepared.splits["train"]
    tokens = format_count(int(rows.lengths.sum()), "token")
    others = (f"{name} {format_count(len(of), 'row')}" for name, of in prepared.splits.items() if len(of))
    return planned("data", "; ".join((f"{format_count(len(rows), 'row')} to learn from, {tokens}", *list(others)[1:])))


def _require_training(config: Config) -> None:
    if not isinstance(config.trainer, FinetuneTrainer):
        raise InputError(
            what="there is nothing to plan: this configuration does not train",
            where="trainer.type",
            fix="set trainer.type: finetune",
        )


def _require_rows(num_rows: int | None, sequence_length: int | None, *, has_dataset: bool, has_data: bool) -> None:
    """Refuse data and made-up rows together, half of what made-up rows need, and neither."""
    sizes = {"--rows": num_rows, "--sequence-length": sequence_length}
    missing = [flag for flag, value in sizes.items() if value is None]
    if len(missing) == len(sizes):
        if not has_data:
            raise ConfigError(
                what="there is no data set, and a plan depends on how long its rows are",
                expected="--dataset FILE, the key `dataset`, or dataset=… in Python",
                fix="name a csv, tsv, json, jsonl or parquet file; or, before there is one, say how large it will be "
                "with --rows N --sequence-length N",
            )
        return
    if has_dataset:
        raise InputError(
            what="both a data set and the size of one are given",
            where="command line",
            fix="keep --dataset, whose rows are read, or --rows and --sequence-length, which stand for rows",
        )
    if missing:
        (given,) = sizes.keys() - set(missing)
        raise InputError(
            what=f"{given} is given without {missing[0]}",
            where="command line",
            expected="both: so many rows to train on, each of so many tokens",
            fix=f"add {missing[0]} N",
        )
    require_whole("num_rows", num_rows or 0, most=MOST_MADE_UP)
    require_whole("sequence_length", sequence_length or 0, least=2, most=MOST_TOKENS)


# What a plan is made of beside `memory` and the rows, which are the same.
_KEYS = ("batch_size", "use_maximum_batch_size", "batch_search", "chunked_loss", "packing")


_LAYOUT = "trainer.packing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Hold what is decided before the weights are loaded."""

    session: Session  # with what was chosen
    request: PlanRequest
    plan: TrainingPlan | None  # None: the run continues with its own, or the architecture cannot be traced
    saved: Mapping[str, Any] | None = None  # plan.json's content, where the run continues with it
    cutter: Cutter | None = None  # the checkpoint's, where the run continues with it

    def launched(self, llm: LLM, session: Session, *, say: Say, tries: bool = True) -> tuple[Session, Launched]:
        """Prove the plan on the device, and keep it for later runs.

        session: with what was chosen when the model was built, too; it is returned with what could only be chosen once
        sizes had been tried. tries: False: nothing is run, since the model is not on the device yet.
        """
        if self.cutter is not None:
            return session, Launched(cutter=self.cutter, request=self.request, saved=self.saved)
        if not tries:
            return session, untried(self.plan, self.request)
        say(status("trying the plan on the device"))
        launched = launch(self.plan, self.request, llm, pad_id=session.encoder.pad_id, say=say)
        if launched.told:
            say(Note(f"launch: {launched.told}", kind="detail"))
        if launched.request is not self.request:
            chosen = launched.request.largest_choice(found=launched.told)
            say(warning(str(chosen), topic="run"))
            session = with_choices(session, [chosen])
        if launched.plan is not None and launched.plan != self.plan:
            keep(launched.plan, launched.request, launched.plan.budget, every_way=False, say=say)
        return session, launched


def plan_of_run(
    session: Session, prepared: Prepared, run: RunFolder, checkpoint: Checkpoint | None, *, replan: bool, say: Say
) -> RunPlan:
    """Continue with the run's own plan where it still holds; else plan.

    Raises InputError naming the rows that do not fit, where batches are partitioned by length.
    """
    request = request_of(session, prepared, course=None if checkpoint is None else checkpoint.state["course"])
    choices = request.execution_choices()
    for note in begun_otherwise(session, choices, checkpoint):
        say(note)
    if choices:
        for line in choice_notes(choices):
            say(line)
        session = with_choices(session, choices)
        request = replace(request, config=session.config)
    request.keep_to(request.budget())
    saved = None if checkpoint is None or replan else _still_holds(request, session, run, checkpoint, say)
    here = Place.of_environment().local_world_size
    if saved is not None and checkpoint is not None:
        if saved["plan"] is not None:
            before = TrainingPlan.from_dict(saved["plan"])
            require_host_room(before, num_processes=here)
            _settle_heap(before, request)
        session, cutter = with_plan_of(session, checkpoint, run), cutter_of(checkpoint.state["cutter"])
        return RunPlan(session=session, request=request, plan=None, saved=saved, cutter=cutter)
    try:
        planned = plan_run(request, every_way=False, replan=replan, say=say)
    except UntraceableError as error:
        if request.task.fixed_rows is None:
            say(planned_line("batch", f"{error.problems[0].what}; so batch sizes are tried out"))
        request.require_phases()
        if request.leaves_layout_open:
            session = with_choices(session, [Choice(key=_LAYOUT, value=False, reason="what it takes is not known")])
            request = replace(request, config=session.config)
        for line in _without_plan(request):
            say(warning(line, topic="plan"))
        return RunPlan(session=session, request=request, plan=None)
    request = planned.request
    if planned.plan.chosen is None and request.task.fixed_rows is None:
        raise InputError(*too_long(planned.plan))
    require_host_room(planned.plan, num_processes=here)
    heap = _settle_heap(planned.plan, request)
    told = short_plan(planned.plan, phase_notes=tuple(request.phase_notes()))
    if planned.plan.chosen is None:
        rows = format_count(int(request.trainer.batch_size), "row")
        at_own_risk = (
            f"the run takes micro-batches of {rows}, as trainer.batch_size says; "
            "where memory runs out they are halved. batch_size: auto makes them fit"
        )
        told.append(warning(at_own_risk, topic="plan"))
    chosen = choice_notes(planned.choices)
    for line in [*(line for line in told if line not in chosen), *chosen, *heap]:  # the plan's advice has choices, too
        say(line)
    return RunPlan(session=with_choices(session, planned.choices), request=request, plan=planned.plan)


def _without_plan(request: PlanRequest) -> Iterator[str]:
    """Yield notes on the phases, which a plan would have had, and on what it would have done about them."""
    if request.is_sized_by_memory:
        return  # the search says it
    yield from request.phase_notes()
    if request.trainer.batch_increase_function is not None and not request.has_begun:
        yield (
            "the memory does not bound trainer.batch_increase_function here, since how many rows fit cannot be "
            "predicted; trainer.max_batch_size does"
        )


def _settle_heap(plan: TrainingPlan, request: PlanRequest) -> list[str]:
    """Settle the heap of a CPU; where what is freed is kept, return a note. With a budget `keep_to` has done it."""
    is_kept = settle_heap(is_cpu=request.device.is_cpu, is_ample=plan.is_ample)
    told = Note(
        "the process will come to hold more than the plan needs, as peak_bytes will show: memory is ample, so the C "
        "library keeps what is freed for the next tensors (memory.budget has it given back, which takes time)",
        kind="detail",
        topic="memory",
    )
    return [told] if is_kept and request.config.memory.budget == "auto" else []


def _memory_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `memory` of a checkpoint's settings, which may be of a version that could not offload."""
    return {"offload": "none", **(settings.get("memory") or {})}


def _still_holds(
    request: PlanRequest, session: Session, run: RunFolder, checkpoint: Checkpoint, say: Say
) -> Mapping[str, Any] | None:
    """Return plan.json's content, where the checkpoint's partition may be kept; None where the run must plan."""
    before, now = checkpoint.state["settings"], session.config.model_dump(mode="json")
    if "cutter" not in checkpoint.state or _memory_of(before) != now["memory"]:
        return None
    if any(now["trainer"][key] != {"packing": False, **before["trainer"]}.get(key) for key in _KEYS):
        return None
    if now["model_parameters"]["kernels"] != before["model_parameters"].get("kernels", "torch"):
        return None
    checkpointing = now["trainer"]["enable_gradient_checkpointing"]
    if checkpointing not in ("auto", before["trainer"]["enable_gradient_checkpointing"]):
        return None
    saved = _saved(run)
    if saved is None or saved["plan"] is None:
        return saved
    budget = request.budget()
    needed = TrainingPlan.from_dict(saved["plan"])
    if needed.budget.device != budget.device:
        told = f"the run was planned for {needed.budget.device}; this is {budget.device}, so it is planned again"
        say(warning(told, topic="run"))
        return None
    if needed.chosen is not None and (needed.chosen.total_bytes or 0) > budget.limit_bytes - budget.margin_bytes:
        say(warning("there is less memory than when the run was planned, so it is planned again", topic="run"))
        return None
    return saved


def _saved(run: RunFolder) -> Mapping[str, Any] | None:
    """Read plan.json; None where it is damaged, or of a version of brim that planned nothing."""
    try:
        plan = read_json(run.plan)
        if plan["plan"] is not None:
            read = TrainingPlan.from_dict(plan["plan"])
            _ = read.is_ample, read.budget.reserved_bytes + 0  # numbers, as far as a run goes by them
        return {"plan": plan["plan"], "launch": plan["launch"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
