"""A plan made by hand: LoRA on a T4, where the longest row fits only with the loss in chunks."""

from __future__ import annotations

from dataclasses import replace

from brim.batching.costs import Costs
from brim.batching.surface import Surface
from brim.planning.budget import Budget
from brim.planning.lengths import summarize_lengths
from brim.planning.plan import Candidate, LongRow, TrainingPlan, Way

MIB = 2**20
GIB = 2**30


def hand_made_costs():
    """1 MiB and 1 ms a token, on 4 GiB of weights."""
    return Costs(
        peak=Surface(
            base=float(4 * GIB),
            lengths=(64, 2048),
            tokens=((64, 4096), (2048, 8192)),
            values=((4 * GIB + 64 * MIB, 8 * GIB), (6 * GIB, 12 * GIB)),
        ),
        static_bytes=4 * GIB,
        time=Surface(base=0.001, lengths=(64,), tokens=((64, 4096),), values=((0.065, 4.097),)),
    )


def hand_made_candidate(*, checkpointing=False, chunked=True, seconds=120.0, total_bytes=13 * GIB):
    return Candidate(
        way=Way(gradient_checkpointing=checkpointing, chunked_loss=chunked),
        fits=True,
        reason="its largest micro-batch, 12 × 512 tokens, takes 13.0 GiB in all",
        single_row_bytes=9 * GIB,
        total_bytes=total_bytes,
        cap_bytes=12 * GIB,
        cap_binds=True,
        widest=(12, 512),
        micro_batches_per_step=4.25,
        padding=1.031,
        seconds_per_epoch=seconds,
        bound_by="arithmetic",
        time_source="estimated",
        too_long=(),
        longest_that_fits=1417,
    )


def does_not_fit(candidate, *, too_long=(1,), longest_that_fits=1024):
    return replace(
        candidate,
        fits=False,
        reason="the longest row, 1,417 tokens, takes 15.0 GiB alone, and 13.0 GiB are there",
        single_row_bytes=16 * GIB,
        total_bytes=None,
        widest=None,
        micro_batches_per_step=None,
        padding=None,
        seconds_per_epoch=None,
        bound_by=None,
        too_long=too_long,
        longest_that_fits=longest_that_fits,
    )


def hand_made_plan(**changes):
    """Four ways, of which two fit."""
    chosen = hand_made_candidate()
    candidates = (
        chosen,
        does_not_fit(hand_made_candidate(chunked=False)),
        hand_made_candidate(checkpointing=True, seconds=160.0, total_bytes=7 * GIB),
        does_not_fit(hand_made_candidate(checkpointing=True, chunked=False)),
    )
    plan = TrainingPlan(
        budget=Budget(
            device="t4",
            limit_bytes=15 * GIB,
            outside_bytes=512 * MIB,
            margin_bytes=300 * MIB,
            limit_reason="all that the device has",
            margin_reason="2% of the budget",
        ),
        lengths=summarize_lengths([17] * 3 + [100] * 60 + [300] * 30 + [1024] * 6 + [1417]),
        effective_batch_size=32,
        total_steps=12,
        candidates=candidates,
        chosen=chosen,
        reason="an epoch takes 2 min 0 s, checkpointing, loss in chunks 2 min 40 s",
        costs=hand_made_costs(),
        seconds=360.0,
        advice=("adapter.dropout 0.05: another cut draws other masks, so losses are not the same on every card",),
        from_cache=False,
    )
    return replace(plan, **changes)


def plan_that_does_not_fit(*, num_long=2):
    """No way fits; every row of more than 1,024 tokens is why."""
    plan = hand_made_plan()
    candidates = tuple(does_not_fit(each) for each in plan.candidates)
    rows = tuple(LongRow(key=7 * n, num_tokens=1400 + n, total_bytes=16 * GIB + n * MIB) for n in range(num_long))
    return replace(
        plan, candidates=candidates, chosen=None, reason="no way fits", costs=None, seconds=None, too_long=rows
    )
