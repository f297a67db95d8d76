"""Responses, and their scores, for the rows of a prediction that have none yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from brim.api.evaluation import respond, said
from brim.api.forward_planning import batches_for
from brim.api.generation_request import rows_by_hand
from brim.api.inference import engine_by_hand
from brim.api.planned_generation import planned_engine
from brim.api.session import Say, Session
from brim.api.vllm_engine import vllm_engine
from brim.batching.peak_meter import peak_meter
from brim.data import TokenRows
from brim.infer.done_rows import DoneRows
from brim.infer.engine import Engine
from brim.infer.evaluate import score_rows
from brim.infer.response import Finished
from brim.infer.response_record import response_bytes, response_of, score_bytes
from brim.infer.response_scores import BATCH_TOKENS, rows_to_score, score_batches
from brim.infer.slots_engine import SlotsEngine
from brim.models.llm import LLM
from brim.notes import status
from brim.planning.budget import Budget
from brim.units import format_bytes

_A_FEW = 8  # prompts


class Generation:
    """An engine about to respond. `about`: what to know of it, beforehand and, with more in it, afterwards."""

    def __init__(self, weights: Callable[[], LLM], session: Session, prompts: TokenRows, *, say: Say) -> None:
        """weights: loads the model, where the engine does not do that itself."""
        self._engine: Engine
        self._budget: Budget | None = None
        self._say = say
        self._meter = peak_meter(session.device)
        if session.config.generation.engine == "vllm":
            rows = rows_by_hand(session.config)
            self._engine = vllm_engine(session, rows=rows)
            self.about: dict[str, Any] = {"engine": self._engine.name, "rows_at_once": rows}
            return
        planned = planned_engine(weights(), session, prompts, say=say, on_smaller=lambda smaller: say(str(smaller)))
        self._engine, plan = planned.engine, planned.plan
        self._budget = plan.budget
        say(status("generating"))
        self.about = {
            "engine": self._engine.name,
            "rows_at_once": plan.rows_at_most,
            "predicted_peak_bytes": plan.total_bytes,
            "plan": plan.as_dict(),
        }

    def run(self, prompts: TokenRows, done: DoneRows, *, measures: bool, on_batch: Callable[[int], None]) -> float:
        """Respond to the rows that are not done, and note each as it ends. Returns the seconds.

        measures: note the peak of memory, too, for which garbage is collected first: a fifth of a second.
        on_batch: told how many more rows are done.
        """
        to_do = done.to_do()

        def keep(finished: Sequence[Finished]) -> None:
            positions = [int(to_do[each.position]) for each in finished]
            done.add(positions, [response_bytes(each.response) for each in finished])
            on_batch(len(finished))

        if measures:
            self._meter.begin()
        started = time.perf_counter()
        self._engine.run(prompts.take(to_do), on_finished=keep)
        seconds = time.perf_counter() - started
        peak_bytes = self._meter.peak_bytes() if measures else None
        self.about["measured_peak_bytes"] = peak_bytes
        if self._budget is not None and peak_bytes is not None and peak_bytes > self._budget.limit_bytes:
            limit = f"{format_bytes(self._budget.limit_bytes)} ({self._budget.limit_reason})"
            self._say(f"memory: {format_bytes(peak_bytes)} were taken at the peak, more than {limit}")
        if isinstance(self._engine, SlotsEngine):
            passes = self._engine.statistics
            self.about["passes"] = asdict(passes) | {"mean_rows": passes.mean_rows}
        return seconds


def answered(llm: LLM, session: Session, prompts: TokenRows, *, say: Say, on_batch: Callable[[int], None]) -> list[str]:
    """Return the model's text for each of at least one prompt; a few are answered before a plan would be made.

    Where there is a budget to keep to, they are planned, too.
    """
    if len(prompts) > _A_FEW or session.config.memory.budget != "auto":
        engine = planned_engine(llm, session, prompts, say=say, on_smaller=lambda smaller: say(str(smaller))).engine
    else:
        rows = min(rows_by_hand(session.config) or _A_FEW, len(prompts))
        engine = engine_by_hand(llm, session, batch_rows=said(rows, say))
    say(status("generating"))
    texts: list[str] = respond(engine, session, prompts, on_batch=on_batch)["response"].tolist()
    return texts


def score_missing(
    llm: LLM, session: Session, prompts: TokenRows, responses: DoneRows, scores: DoneRows, *, say: Say
) -> None:
    """Score the responses that have no score, in the batches that all of them would be scored in.

    Where memory.budget, or what memory is left, does not hold such a batch, it is cut as an evaluation's is.
    """
    is_missing = np.zeros(len(prompts), dtype=np.bool_)
    is_missing[scores.to_do()] = True
    rows = rows_to_score(prompts, lambda position: response_of(responses.body(position)))
    at_once = batches_for(session, [rows], llm=llm, say=say, whole_tokens=BATCH_TOKENS)
    for positions in score_batches(rows.lengths):
        if not is_missing[positions].any():
            continue
        found = score_rows(
            llm.model,
            rows.take(positions),
            pad_id=session.encoder.pad_id,
            batch_rows=at_once,
            device=llm.device,
            precision=llm.precision,
            head=llm.head,
        )
        new = is_missing[positions]  # a score that is there stays, to the bit
        scores.add(positions[new].tolist(), [score_bytes(-loss) for loss in found.loss[new].tolist()])
