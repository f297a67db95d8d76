"""Decide how a run partitions its batches: as it was planned when it began, or as it is planned now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from brim.batching import Cutter, cutter_of
from brim.data import Prepared
from brim.errors import InputError
from brim.memory import UntraceableError
from brim.memory.devices import settle_heap
from brim.models import LLM
from brim.notes import Note, Say, planned as planned_line, status, warning
from brim.planning import PlanRequest, TrainingPlan, keep, plan_run, short_plan, too_long
from brim.session import Session, choice_notes, with_choices
from brim.train import Checkpoint, RunFolder
from brim.units import format_count
from brim.workflows.runs import read_json
from brim.workflows.training.launch import Launched, launch
from brim.workflows.training.planning import request_of
from brim.workflows.training.resuming import with_plan_of

# What a plan is made of beside `memory` and the rows, which are the same.
_KEYS = ("batch_size", "use_maximum_batch_size", "batch_search", "chunked_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Hold what is decided before the weights are loaded."""

    session: Session  # with what was chosen
    request: PlanRequest
    plan: TrainingPlan | None  # None: the run continues with its own, or the architecture cannot be traced
    saved: Mapping[str, Any] | None = None  # plan.json's content, where the run continues with it
    cutter: Cutter | None = None  # the checkpoint's, where the run continues with it

    def launched(self, llm: LLM, session: Session, *, say: Say) -> tuple[Session, Launched]:
        """Prove the plan on the device, and keep it for later runs.

        session: with what was chosen when the model was built, too; it is returned with what could only be chosen once
        sizes had been tried.
        """
        if self.cutter is not None:
            return session, Launched(cutter=self.cutter, request=self.request, saved=self.saved)
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
    request.keep_to(request.budget())
    saved = None if checkpoint is None or replan else _still_holds(request, session, run, checkpoint, say)
    if saved is not None and checkpoint is not None:
        if saved["plan"] is not None:
            _settle_heap(TrainingPlan.from_dict(saved["plan"]), request)
        session, cutter = with_plan_of(session, checkpoint, run), cutter_of(checkpoint.state["cutter"])
        return RunPlan(session=session, request=request, plan=None, saved=saved, cutter=cutter)
    try:
        planned = plan_run(request, every_way=False, replan=replan, say=say)
    except UntraceableError as error:
        if request.task.fixed_rows is None:
            say(planned_line("batch", f"{error.problems[0].what}; so batch sizes are tried out"))
        request.require_phases()
        for line in _without_plan(request):
            say(warning(line, topic="plan"))
        return RunPlan(session=session, request=request, plan=None)
    request = planned.request
    if planned.plan.chosen is None and request.task.fixed_rows is None:
        raise InputError(*too_long(planned.plan))
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


def _still_holds(
    request: PlanRequest, session: Session, run: RunFolder, checkpoint: Checkpoint, say: Say
) -> Mapping[str, Any] | None:
    """Return plan.json's content, where the checkpoint's partition may be kept; None where the run must plan."""
    before, now = checkpoint.state["settings"], session.config.model_dump(mode="json")
    if "cutter" not in checkpoint.state or before.get("memory") != now["memory"]:
        return None
    if any(now["trainer"][key] != before["trainer"].get(key) for key in _KEYS):
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
