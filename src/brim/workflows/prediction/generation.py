"""Respond to the rows of a prediction, and score the responses, with the model of this process.

While responses are generated, the adapter is merged into the base's weights, where that pays and changes nothing much.
A step of generation computes little for each token, so that the adapter's small products cost up to a third of it.
Merged, they cost nothing, but the sum is rounded to the base's dtype: in fp32 by as much as another batch would change
scores, in 16 bits by more. So the two models are compared on the ends of prompts first, by the measure and the limit of
`brim export --merge`, while each layer makes its merged weight anew.

Afterwards the weights are put back to the bit. What that takes is kept beside them and counted by the plan, unless
nothing will be computed with them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from brim.batching.memory import OutOfMemory, attempt, free_caches, peak_meter
from brim.config import Choice
from brim.config.schema import NoTrainer
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import InputError, OutOfMemoryError
from brim.infer import DoneRows, score_bytes
from brim.infer.engines import Engine, Finished, Response, SlotsEngine
from brim.infer.metrics import BATCH_TOKENS, Divergence, Runner, rows_to_score, score_batches
from brim.memory import Asked, ConfigWorkload, UntraceableError, tracing
from brim.memory.devices import Budget
from brim.models import LLM, PassingMerge, is_adapted, model_note
from brim.notes import Note, Say, status
from brim.planning import GenerationRequest, generation_request, plan_job, recut, rows_by_hand
from brim.session import Session, say_nothing
from brim.units import format_bytes, format_count
from brim.workflows.prediction.launch import planned_engine, vllm_engine
from brim.workflows.prediction.scoring import Load, batches_for, scored

_KEY = "generation.merge_adapter"


# Of responses, at most. Comparing and merging take as long as 600 to 9,000 tokens save: see docs/engines.md.
_WORTH_TOKENS = 16_384


_PROBE_ROWS, _PROBE_TOKENS = 4, 32  # the ends of so many prompts; all logits of them are in memory, twice


class Generation:
    """Respond with an engine, within a context that merges the adapter where that pays.

    `about`: facts on it for the job, with more of them once it has run.
    """

    def __init__(
        self,
        weights: Load,
        session: Session,
        prompts: TokenRows,
        *,
        is_spent: bool,
        compared: TokenRows | None = None,
        num_members: int = 1,
        say: Say,
    ) -> None:
        """Load and plan. weights: loads the model, where the engine does not do that itself. is_spent: see predict.

        compared: rows of which some are to show how far a merged adapter moves predictions, where the prompts are known
        by their lengths alone. num_members: that respond to the prompts, each to its share.
        """
        self._engine: Engine
        self._budget: Budget | None = None
        self._say = say
        self._meter = peak_meter(session.device)
        self._merged = ExitStack()
        if session.config.generation.engine == "vllm":
            self._engine = vllm_engine(session, rows=rows_by_hand(session.config))
            self.about: dict[str, Any] = {"engine": "vllm", "rows_at_once": rows_by_hand(session.config)}
            say(status("generating", is_planned=True))
            return
        llm = weights()
        say(model_note(session.config, llm, trains=False))
        with ExitStack() as stack:
            merged = stack.enter_context(
                adapter_merged(llm, session, prompts, is_spent=is_spent, compared=compared, say=say)
            )
            how: dict[str, Any] = {"beside_bytes": merged.beside_bytes, "num_members": num_members}
            self._engine, plan = planned_engine(llm, merged.session, prompts, **how, say=say)
            self._budget = plan.budget
            say(status("generating", is_planned=True))
            self.about = {
                "engine": self._engine.name,
                "merge_adapter": merged.is_merged,
                "rows_at_once": plan.rows_at_most,
                "predicted_peak_bytes": plan.total_bytes,
                "plan": plan.as_dict(),
            }
            self._merged = stack.pop_all()  # the last: whatever fails before has the weights put back

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exception: object) -> None:
        self._merged.close()

    def run(self, prompts: TokenRows, *, on_finished: Callable[[Sequence[Finished]], None], measures: bool) -> float:
        """Respond to every prompt, as Engine.run does. Return the seconds.

        measures: note the peak of memory, too, for which garbage is collected first, which takes 0.2 s.
        """
        if measures:
            self._meter.begin()
        started = time.perf_counter()
        self._engine.run(prompts, on_finished=on_finished)
        seconds = time.perf_counter() - started
        self.about["measured_peak_bytes"] = peak_bytes = self._meter.peak_bytes() if measures else None
        if self._budget is not None and peak_bytes is not None and peak_bytes > self._budget.limit_bytes:
            limit = f"{format_bytes(self._budget.limit_bytes)} ({self._budget.limit_reason})"
            self._say(f"memory: the peak was {format_bytes(peak_bytes)}, more than {limit}")
        if isinstance(self._engine, SlotsEngine):
            passes = self._engine.statistics
            self.about["passes"] = asdict(passes) | {"mean_rows": passes.mean_rows}
        return seconds


def score_missing(
    llm: LLM, session: Session, prompts: TokenRows, responses: DoneRows, scores: DoneRows, *, say: Say
) -> None:
    """Score the responses that have no score, in the batches that all of them would be scored in.

    Where memory.budget, or the free memory, does not hold such a batch, it is partitioned as an evaluation's is.
    """
    is_missing = np.zeros(len(prompts), dtype=np.bool_)
    is_missing[scores.to_do()] = True
    rows = rows_to_score(prompts, lambda position: Response.of_bytes(responses.body(position)))
    at_once = batches_for(session, [rows], llm=llm, say=say, whole_tokens=BATCH_TOKENS, doing="scoring")
    for positions in score_batches(rows.lengths):
        if not is_missing[positions].any():
            continue
        found = scored(llm, session, rows.take(positions), at_once)
        new = is_missing[positions]  # a score that is there stays, to the bit
        scores.add(positions[new].tolist(), [score_bytes(-loss) for loss in found.loss[new].tolist()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Say what engines compute with."""

    session: Session  # by which they are planned: of a merged model, it has no adapter
    is_merged: bool = False
    beside_bytes: int = 0  # of what is kept to put the weights back


@contextmanager
def adapter_merged(
    llm: LLM, session: Session, prompts: TokenRows, *, is_spent: bool, compared: TokenRows | None = None, say: Say
) -> Iterator[Merged]:
    """Merge the model's adapter for as long as the context lasts, or not; a note says which and why.

    is_spent: nothing will be computed with the weights afterwards; they are left merged. compared: rows of which the
    first are compared; default: the prompts.
    Raises InputError where `generation.merge_adapter` is true and it cannot be done, and OutOfMemoryError where memory
    runs out over it and the weights are overwritten already.
    """
    if session.config.generation.merge_adapter is False or not is_adapted(llm.model):
        yield Merged(session=session)
        return
    say(status("merging the adapter"))
    llm.model.eval()  # while PEFT's layers are in it, too
    merge = PassingMerge(cast(Any, llm.model))
    request = partial(generation_request, lengths=prompts.lengths, llm=llm)
    tried = partial(_compared, merge, llm, session, prompts if compared is None else compared)
    choice = _choice(merge, session, prompts, request, is_spent=is_spent, compared=tried)
    kept_bytes = 0 if is_spent else merge.kept_bytes
    with ExitStack() as stack:
        if choice.value:
            done = attempt(lambda: stack.enter_context(merge.done(keeps=not is_spent)))
            if isinstance(done, OutOfMemory):
                choice = _given_up(done, is_open=not is_spent and session.config.generation.merge_adapter == "auto")
        say(Note(str(choice), kind="detail"))
        if choice.value:
            yield Merged(session=_as_base(session), is_merged=True, beside_bytes=kept_bytes)
        else:
            yield Merged(session=session)


def request_as_merged(
    asked: Asked, session: Session, prompts: TokenRows, *, num_members: int, is_spent: bool, is_at_hand: bool, say: Say
) -> GenerationRequest:
    """Return the request of a job before it has weights, with the adapter merged where the job would merge it.

    How far predictions move then is not known, and counts as little. Other arguments and errors as in `adapter_merged`
    and `generation_request`.
    """
    request = partial(
        generation_request, lengths=prompts.lengths, asked=asked, is_at_hand=is_at_hand, num_members=num_members
    )
    config = session.config
    if config.adapter is None or config.generation.merge_adapter is False or config.generation.engine == "vllm":
        return request(session)
    against = "the base is quantised" if config.quantization is not None else _too_few(session, prompts)
    merge = None if against else _without_weights(asked, session)
    choice = Choice(key=_KEY, value=False, reason=against)
    if merge is not None:
        choice = _choice(merge, session, prompts, request, is_spent=is_spent, compared=None)
    if choice.reason:
        say(Note(str(choice), kind="detail"))
    if merge is None or not choice.value:
        return request(session)
    return request(_as_base(session), beside_bytes=0 if is_spent else merge.kept_bytes)


def _without_weights(asked: Asked, session: Session) -> PassingMerge | None:
    """Return the merge of a model whose tensors are nowhere; None where it has no adapter, or cannot be built."""
    workload = ConfigWorkload(session.config, session.folder, asked.architecture, target=None)
    try:
        with tracing(session.folder), torch.device("meta"):
            model = workload.evaluation().build(asked.architecture)
    except UntraceableError:
        return None  # as the plan will say
    return PassingMerge(cast(Any, model)) if is_adapted(model) else None


def _as_base(session: Session) -> Session:
    """Return the session by which a merged model is planned: without an adapter, and with weights that do not train."""
    config = session.config.having("adapter", None)
    trainer = NoTrainer(batch_size=rows_by_hand(config) or "auto", packing=config.trainer.packing)
    return replace(session, config=config.having("trainer", trainer))


def _given_up(failure: OutOfMemory, *, is_open: bool) -> Choice:
    """Return the choice not to merge. Raises OutOfMemoryError where it was asked for, or weights are overwritten."""
    free_caches()
    what = f"memory ran out while it was merged: {failure.message}"
    if is_open:
        return Choice(key=_KEY, value=False, reason=what)
    raise OutOfMemoryError(
        what=f"{_KEY}: {what}",
        where=_KEY,
        fix=f"set {_KEY}: false, and write to another output where a prediction began with merged weights",
    )


def _choice(
    merge: PassingMerge,
    session: Session,
    prompts: TokenRows,
    request: Callable[[Session], GenerationRequest],
    *,
    is_spent: bool,
    compared: Callable[[], tuple[Divergence, float]] | None,
) -> Choice:
    """Return whether to merge. compared: tells how far predictions move, and how far they may; None: that is open."""
    is_open = session.config.generation.merge_adapter == "auto"
    against = merge.against or _too_few(session, prompts)
    against = against or _memory_against(merge, request(_as_base(session)), is_spent=is_spent, is_open=is_open)
    if against and not is_open:
        is_begun = any(choice.key == _KEY for choice in session.choices)
        when = ", as it was when this prediction began" if is_begun else ""
        raise InputError(
            what=f"the adapter cannot be merged while responses are generated{when}: {against}",
            where=_KEY,
            fix="free memory or raise memory.budget, or write to another output" if is_begun else f"set {_KEY}: auto",
        )
    kept = "" if is_spent else f"; {format_bytes(merge.kept_bytes)} are kept to put the weights back"
    if against or not is_open:
        return Choice(key=_KEY, value=not against, reason=against or f"as asked{kept}")
    if compared is None:
        return Choice(key=_KEY, value=True, reason=f"if predictions hardly move, which is tried with the weights{kept}")
    try:
        found, limit = compared()
    except OutOfMemoryError as error:
        return Choice(key=_KEY, value=False, reason=f"memory ran out while it was compared: {error.problems[0].what}")
    is_close = found.mean_kl <= limit  # not of NaN
    moved = f"predictions move by {found.mean_kl:.2g} nats a token, the limit is {limit:.2g}"
    return Choice(key=_KEY, value=is_close, reason=moved + kept * is_close)


def _too_few(session: Session, prompts: TokenRows) -> str:
    """Return why a merge does not pay; an empty text where it does, or is asked for."""
    generation = session.config.generation
    num_tokens = len(prompts) * cast(int, generation.max_new_tokens)
    if generation.merge_adapter != "auto" or num_tokens >= _WORTH_TOKENS:
        return ""
    return f"responses have up to {format_count(num_tokens, 'token')}, and it pays from {_WORTH_TOKENS:,} on"


def _memory_against(merge: PassingMerge, request: GenerationRequest, *, is_spent: bool, is_open: bool) -> str:
    """Return why there is too little memory; an empty text where there is enough, or nothing is predicted."""
    plan = plan_job(request, say=say_nothing)
    if plan.costs is None:
        return "" if is_spent or not is_open else "what generation takes is not known, nor whether there is more"
    kept_bytes = 0 if is_spent else merge.kept_bytes
    left_bytes = plan.cap_bytes - plan.costs.static_bytes
    if kept_bytes + merge.working_bytes > left_bytes:
        needed = format_bytes(kept_bytes + merge.working_bytes)
        return f"merging takes {needed}, and {format_bytes(max(left_bytes, 0))} are left beside the weights"
    beside = recut(plan, request.lengths, plan.costs, cap_bytes=plan.cap_bytes - kept_bytes)
    if is_open and (beside.rows < plan.rows or beside.fits < plan.fits):
        kept = f"beside the weights that are kept, {format_bytes(kept_bytes)}"
        return f"{kept}, {format_count(beside.rows, 'row')} would run together, not {plan.rows:,}"
    return ""


def _compared(merge: PassingMerge, llm: LLM, session: Session, prompts: TokenRows) -> tuple[Divergence, float]:
    """Return how far the merged model is from the unmerged one, and how far it may be."""
    how = Runner(pad_id=session.encoder.pad_id, batch_rows=1, device=llm.device)
    rows = TokenRows.from_rows([_end_of(row) for row in islice(prompts, _PROBE_ROWS)])
    before = list(how.logits(llm.model, rows, llm.precision))
    adapter_kl = how.adapter_kl(llm.model, rows, llm.precision, before=before)
    with merge.tried():
        found = Divergence.between(before, how.logits(llm.model, rows, llm.precision))
    return found, Divergence.limit_of(adapter_kl)


def _end_of(row: TokenRow) -> TokenRow:
    ids = row.input_ids[-_PROBE_TOKENS:]
    return TokenRow(key=row.key, input_ids=ids, supervised=np.ones(len(ids), dtype=np.bool_))
