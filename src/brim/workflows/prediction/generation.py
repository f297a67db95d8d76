"""Respond to the rows of a prediction, and score the responses, with the model of this process.

How many processes do that together is read here, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from brim.batching.memory import peak_meter
from brim.config.schema import Config
from brim.data.tokens import TokenRows
from brim.distributed import num_processes
from brim.infer import DoneRows, num_actors, score_bytes
from brim.infer.engines import Engine, Finished, Response, SlotsEngine
from brim.infer.metrics import BATCH_TOKENS, rows_to_score, score_batches
from brim.memory.devices import Budget
from brim.models import LLM, model_note
from brim.notes import Say, status
from brim.planning import rows_by_hand
from brim.session import Session
from brim.units import format_bytes
from brim.workflows.prediction.launch import planned_engine, vllm_engine
from brim.workflows.prediction.merged import adapter_merged
from brim.workflows.prediction.scoring import Load, batches_for, scored


def num_members(config: Config, gpus: int | str | None, *, is_here: bool = True) -> int:
    """Return how many processes predict: of this machine, one by default, or actors of a Ray cluster, all by default.

    Raises InputError as num_processes and Actors do.
    """
    if config.backend.type == "local":
        return num_processes(str(1 if gpus is None else gpus), None, is_here=is_here)
    asked = config.backend.trainer.num_workers if gpus is None else gpus
    if asked in (None, "all"):
        return num_actors(torch.cuda.is_available())
    return num_processes(str(asked), None, is_here=False)


def is_one_process(config: Config, number: int) -> bool:
    """Return whether this process predicts itself: a Ray cluster may also be there for a lone actor's GPU."""
    return number == 1 and config.backend.type == "local"


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
    at_once = batches_for(session, [rows], llm=llm, say=say, whole_tokens=BATCH_TOKENS)
    for positions in score_batches(rows.lengths):
        if not is_missing[positions].any():
            continue
        found = scored(llm, session, rows.take(positions), at_once)
        new = is_missing[positions]  # a score that is there stays, to the bit
        scores.add(positions[new].tolist(), [score_bytes(-loss) for loss in found.loss[new].tolist()])
