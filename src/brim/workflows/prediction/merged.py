"""Merge the adapter into the base's weights while responses are generated, where that pays and changes nothing much.

A step of generation computes little for each token, so that the adapter's small products cost up to a third of it.
Merged, they cost nothing, but the sum is rounded to the base's dtype: in fp32 by as much as another batch would change
scores, in 16 bits by more. So the two models are compared on the ends of prompts first, by the measure and the limit of
`brim export --merge`, while each layer makes its merged weight anew.

Afterwards the weights are put back to the bit. What that takes is kept beside them and counted by the plan, unless
nothing will be computed with them any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np

from brim.batching.memory import OutOfMemory, attempt, free_caches
from brim.config import Choice
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import InputError, OutOfMemoryError
from brim.infer.metrics import Divergence, Runner
from brim.models import LLM, PassingMerge, is_adapted
from brim.notes import Note, Say, status
from brim.planning import generation_request, plan_job, recut
from brim.session import Session, say_nothing
from brim.units import format_bytes, format_count

_KEY = "generation.merge_adapter"


# Of responses, at most. Comparing and merging take as long as 600 to 9,000 tokens save: see docs/engines.md.
_WORTH_TOKENS = 16_384


_PROBE_ROWS, _PROBE_TOKENS = 4, 32  # the ends of so many prompts; all logits of them are in memory, twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Say what engines compute with."""

    session: Session  # by which they are planned: of a merged model, it has no adapter
    is_merged: bool = False
    beside_bytes: int = 0  # of what is kept to put the weights back


@contextmanager
def adapter_merged(llm: LLM, session: Session, prompts: TokenRows, *, is_spent: bool, say: Say) -> Iterator[Merged]:
    """Merge the model's adapter for as long as the context lasts, or not; a note says which and why.

    is_spent: nothing will be computed with the weights afterwards; they are left merged.
    Raises InputError where `generation.merge_adapter` is true and it cannot be done, and OutOfMemoryError where memory
    runs out over it and the weights are overwritten already.
    """
    if session.config.generation.merge_adapter is False or not is_adapted(llm.model):
        yield Merged(session=session)
        return
    say(status("merging the adapter"))
    llm.model.eval()  # while PEFT's layers are in it, too
    merge = PassingMerge(cast(Any, llm.model))
    as_base = replace(session, config=session.config.having("adapter", None))
    choice = _choice(merge, llm, session, as_base, prompts, is_spent=is_spent)
    kept_bytes = 0 if is_spent else merge.kept_bytes
    with ExitStack() as stack:
        if choice.value:
            done = attempt(lambda: stack.enter_context(merge.done(keeps=not is_spent)))
            if isinstance(done, OutOfMemory):
                choice = _given_up(done, is_open=not is_spent and session.config.generation.merge_adapter == "auto")
        say(Note(str(choice), kind="detail"))
        if choice.value:
            yield Merged(session=as_base, is_merged=True, beside_bytes=kept_bytes)
        else:
            yield Merged(session=session)


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
    merge: PassingMerge, llm: LLM, session: Session, as_base: Session, prompts: TokenRows, *, is_spent: bool
) -> Choice:
    generation = session.config.generation
    is_open = generation.merge_adapter == "auto"
    num_tokens = len(prompts) * cast(int, generation.max_new_tokens)
    against = merge.against
    if not against and is_open and num_tokens < _WORTH_TOKENS:
        against = f"responses have up to {format_count(num_tokens, 'token')}, and it pays from {_WORTH_TOKENS:,} on"
    against = against or _memory_against(merge, llm, as_base, prompts, is_spent=is_spent, is_open=is_open)
    if against and not is_open:
        raise InputError(
            what=f"the adapter cannot be merged while responses are generated: {against}",
            where=_KEY,
            fix=f"set {_KEY}: auto; a prediction that began with merged weights goes on with them",
        )
    kept = "" if is_spent else f"; {format_bytes(merge.kept_bytes)} are kept to put the weights back"
    if against or not is_open:
        return Choice(key=_KEY, value=not against, reason=against or f"as asked{kept}")
    try:
        found, limit = _compared(merge, llm, session, prompts)
    except OutOfMemoryError as error:
        return Choice(key=_KEY, value=False, reason=f"memory ran out while it was compared: {error.problems[0].what}")
    is_close = found.mean_kl <= limit  # not of NaN
    moved = f"predictions move by {found.mean_kl:.2g} nats a token, the limit is {limit:.2g}"
    return Choice(key=_KEY, value=is_close, reason=moved + kept * is_close)


def _memory_against(
    merge: PassingMerge, llm: LLM, as_base: Session, prompts: TokenRows, *, is_spent: bool, is_open: bool
) -> str:
    """Return why there is too little memory; an empty text where there is enough, or nothing is predicted."""
    request = generation_request(as_base, prompts.lengths, llm=llm)
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
