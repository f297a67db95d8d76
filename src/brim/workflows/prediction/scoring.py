"""Score rows, or read layers: plan the batches, bring the plan to the device, and compute losses or vectors.

Where the architecture cannot be traced, batches are tried out instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from brim.batching import cutter_of
from brim.batching.memory import peak_meter
from brim.config.schema import Config
from brim.data.tokens import TokenRows
from brim.distributed import ALONE, Ranks, Sharded
from brim.infer import collect_activations
from brim.infer.engines import Batches, RowsAtOnce, RowsByCost, RowsByTrial, Smaller, longest_first
from brim.infer.metrics import Scores, score_batches, score_rows
from brim.memory.devices import settle_heap
from brim.models import LLM
from brim.notes import OnBatch, Say, status, warning
from brim.planning import ForwardPlan, Unplanned, plan_forward, scoring_lines
from brim.session import Session

Load: TypeAlias = Callable[[], LLM]  # loads the weights, or returns those that are loaded
OnSmaller: TypeAlias = Callable[[Smaller], None]  # called each time that fewer rows go on together


def loading_note(config: Config) -> str:
    """Return what is said when this process loads the model itself, for which a Ray cluster has no use."""
    if config.backend.type == "local":
        return status("loading the model")
    return warning("backend.type: ray has no effect here: this process loads the model and computes", topic="run")


def batches_for(
    session: Session,
    splits: Sequence[TokenRows],
    *,
    llm: LLM | None,
    beside_bytes: int | None = None,
    say: Say,
    on_smaller: OnSmaller | None = None,
    whole_tokens: int | None = None,
    lengths: NDArray[np.int64] | None = None,
    side_by_side: int = 1,
    doing: str = "evaluation",
) -> Batches:
    """Return the batches of trainer.eval_batch_size: so many rows together, or as planned, which is noted.

    splits: that are run one after the other, with at least one row in all. llm, beside_bytes: as in `plan_forward`.
    on_smaller: called where memory did not allow what was planned; None: a note is given.
    whole_tokens: for batches of up to so many tokens that are made already, and stay whole where memory allows it;
    trainer.eval_batch_size does not apply to them. lengths: of all rows, where `splits` has but some of them.
    side_by_side: processes, each as fast as this one, that share the batches. doing: the work, for people.
    """
    tell = on_smaller or (lambda smaller: say(str(smaller)))
    given = session.config.trainer.eval_batch_size if whole_tokens is None else None
    if given is not None and given != "auto":
        return RowsAtOnce(given, on_smaller=tell)
    if llm is not None and llm.gathers is None and llm.device.type == "cpu":
        # The weights, which are mapped from their files, are read into memory, with what the first pass imports.
        rows = next(rows for rows in splits if len(rows))
        scored(llm, session, rows.take([int(np.argmin(rows.lengths))]), RowsAtOnce(1))
    say(status(f"planning the {doing}"))
    lengths = np.concatenate([rows.lengths for rows in splits]) if lengths is None else lengths
    plan = plan_forward(session, lengths, llm=llm, beside_bytes=beside_bytes, whole_tokens=whole_tokens)
    if isinstance(plan, Unplanned) and whole_tokens is not None:
        return RowsAtOnce(whole_tokens, on_smaller=tell)  # of which fewer go on once memory runs out
    if isinstance(plan, ForwardPlan):
        plan = replace(plan, seconds=plan.seconds / side_by_side)
    is_part = beside_bytes is not None or whole_tokens is not None
    for line in scoring_lines(plan, doing=doing, is_part=is_part):
        say(line)
    return batches_of(plan, session.device, on_smaller=tell)


def batches_made(batches: Batches, rows: TokenRows) -> list[NDArray[np.intp]]:
    """Return positions of the rows of each batch, as `batches` would make them; where trials are to tell, as scored."""
    if isinstance(batches, RowsByTrial):
        return list(score_batches(rows.lengths))
    made: list[NDArray[np.intp]] = []
    batches.run(rows, longest_first(rows), made.append, doing="evaluation")
    return made


def batches_of(plan: ForwardPlan | Unplanned, device: torch.device, *, on_smaller: OnSmaller) -> Batches:
    """Return what runs rows as planned. One object is for all evaluations of a run."""
    if isinstance(plan, Unplanned):
        return RowsByTrial(peak_meter(device), on_smaller=on_smaller)
    settle_heap(is_cpu=device.type == "cpu", is_ample=plan.is_ample)
    return RowsByCost(plan.cutter(), on_smaller=on_smaller)


def batches_from(state: Mapping[str, Any], device: torch.device, *, on_smaller: OnSmaller) -> Batches:
    """Return the batches whose `state` this is."""
    if "rows" in state:
        return RowsAtOnce(state["rows"], on_smaller=on_smaller)
    if "cutter" in state:
        return RowsByCost(cutter_of(state["cutter"]), on_smaller=on_smaller)
    return RowsByTrial(peak_meter(device), on_smaller=on_smaller)


def scorer(
    llm: LLM,
    session: Session,
    splits: Mapping[str, TokenRows],
    *,
    beside_bytes: int,
    say: Say,
    on_smaller: OnSmaller,
    ranks: Ranks = ALONE,
    sharded: Sharded | None = None,
) -> Callable[[Sequence[str]], dict[str, dict[str, float]]]:
    """Return what scores splits by their names in a training, under one limit on rows. See `batches_for`.

    Without splits, nothing is planned. ranks: that train together, of which each scores a part of the rows; the first
    one plans. sharded: the model, which then makes its passes on all ranks together.
    """
    if not splits:
        return lambda names: {}
    planned: Batches | None = None

    def plan() -> Mapping[str, Any]:
        nonlocal planned
        rows = list(splits.values())
        planned = batches_for(session, rows, llm=llm, beside_bytes=beside_bytes, say=say, on_smaller=on_smaller)
        return planned.state()

    state = ranks.told("evaluation", plan)
    batches = planned or batches_from(state, session.device, on_smaller=on_smaller)
    part = replace(llm, gathers=None if sharded is None else sharded.beside_others)

    def score(rows: TokenRows) -> Scores:
        return _scored_by(ranks, part, session, rows, batches, sharded)

    return lambda names: {name: score(splits[name]).summary() for name in names}


def _scored_by(
    ranks: Ranks, llm: LLM, session: Session, rows: TokenRows, batches: Batches, sharded: Sharded | None
) -> Scores:
    """Score rows, each rank its part of them: every so many-th of those in order of length."""
    if not ranks.are_several:
        return scored(llm, session, rows, batches)
    if sharded is not None:  # to read the best weights may take longer than a collective waits
        ranks.exchanged("to score", lambda: True)
    order = longest_first(rows)
    mine = rows.take(order[ranks.rank :: ranks.size])

    def score() -> list[list[float]]:
        lists = scored(llm, session, mine, batches).as_lists() if len(mine) else []
        if sharded is not None:
            dummy, shortest = replace(llm, gathers=sharded), rows.take(order[-1:])
            sharded.attend(lambda: scored(dummy, session, shortest, RowsAtOnce(1)))
        return lists

    parts = ranks.exchanged("scores", score)
    return Scores.joined([part for part in parts if part], order=np.argsort(_dealt(order, ranks.size)))


def _dealt(order: NDArray[np.intp], ranks: int) -> NDArray[np.intp]:
    return np.concatenate([order[rank::ranks] for rank in range(ranks)])


def collected(llm: LLM, session: Session, rows: TokenRows, layers: Mapping[str, nn.Module], **how: Any) -> None:
    """Put the outputs of layers into stores. how: the arguments of collect_activations that the model does not say."""
    collect_activations(
        llm.model,
        rows,
        layers,
        pad_id=session.encoder.pad_id,
        device=llm.device,
        precision=llm.precision,
        packed=llm.packed,
        **how,
    )


def scored(
    llm: LLM, session: Session, rows: TokenRows, batches: Batches, *, on_batch: OnBatch = lambda rows: None
) -> Scores:
    """Compute loss and hits of each row under teacher forcing. on_batch: gets the number of rows done since."""
    return score_rows(
        llm.model,
        rows,
        pad_id=session.encoder.pad_id,
        batches=batches,
        device=llm.device,
        precision=llm.precision,
        objective=llm.objective,
        packed=llm.packed,
        on_batch=on_batch,
        run=llm.run,
    )
