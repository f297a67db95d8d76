"""A plan made by hand: LoRA on a T4, where the longest row fits only with the loss in chunks."""

from dataclasses import replace

from brim.batching import Costs, Surface
from brim.memory.devices import Budget
from brim.planning import Candidate, LongRow, PhasePlan, TrainingPlan
from brim.planning.plan import Way, Wire, summarize_lengths

MIB = 2**20
GIB = 2**30
ADVICE = "adapter.dropout 0.05: another cut draws other masks, so losses are not the same on every card"


def hand_made_costs():
    """1 MiB and 1 ms a token, on 4 GiB of weights."""
    peaks = ((4 * GIB + 64 * MIB, 8 * GIB), (6 * GIB, 12 * GIB))
    return Costs(
        peak=Surface(base=float(4 * GIB), lengths=(64, 2048), tokens=((64, 4096), (2048, 8192)), values=peaks),
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


def does_not_fit(candidate):
    cut = ("total_bytes", "widest", "micro_batches_per_step", "padding", "seconds_per_epoch", "bound_by")
    reason = "the longest row, 1,417 tokens, takes 15.0 GiB alone, and 13.0 GiB are available"
    found = {"fits": False, "reason": reason, "single_row_bytes": 16 * GIB, "too_long": (1,), "longest_that_fits": 1024}
    return replace(candidate, **found, **dict.fromkeys(cut))


def hand_made_plan(**changes):
    """Four ways, of which two fit."""
    chosen = hand_made_candidate()
    limits = {"limit_bytes": 15 * GIB, "outside_bytes": 512 * MIB, "margin_bytes": 300 * MIB}
    reasons = {"limit_reason": "all that the device has", "margin_reason": "2% of the budget"}
    plan = TrainingPlan(
        budget=Budget(device="t4", **limits, **reasons),
        lengths=summarize_lengths([17] * 3 + [100] * 60 + [300] * 30 + [1024] * 6 + [1417]),
        effective_batch_size=32,
        total_steps=12,
        candidates=(
            chosen,
            does_not_fit(hand_made_candidate(chunked=False)),
            hand_made_candidate(checkpointing=True, seconds=160.0, total_bytes=7 * GIB),
            does_not_fit(hand_made_candidate(checkpointing=True, chunked=False)),
        ),
        chosen=chosen,
        reason="an epoch takes 2 min 0 s, checkpointing, loss in chunks 2 min 40 s",
        costs=hand_made_costs(),
        seconds=360.0,
        advice=(ADVICE,),
        from_cache=False,
    )
    return replace(plan, **changes)


def plan_on_ranks(*, is_sharded=False):
    """Four ranks, replicated, or sharded where the whole model fits on none."""
    sent = {"update_bytes": 24 * MIB, "round_bytes": 0} if not is_sharded else {"update_bytes": 400, "round_bytes": GIB}
    wire = Wire(num_ranks=4, link="PCIe", source="60% of 16 lanes of PCIe 3.0", bytes_per_s=9.6e9, **sent)
    plan = hand_made_plan()
    chosen = replace(
        plan.chosen,
        way=replace(plan.chosen.way, is_sharded=is_sharded),
        micro_batches_per_step=8.5,
        wire=wire,
        busy_share=0.93,
        seconds_per_epoch_alone=430.0,
    )
    others = tuple(replace(does_not_fit(each), wire=wire) for each in plan.candidates if is_sharded)
    fits = "the whole model fits, and sharding would not be faster"
    reason = "the whole model does not fit in a process: 16.0 GiB" if is_sharded else fits
    return replace(plan, candidates=(*others, chosen), chosen=chosen, strategy_reason=reason)


def hand_made_phase(number, size, first_sample, num_steps, *, rates, total_bytes=13 * GIB):
    rows = size * num_steps
    sizes = {
        "size": size,
        "micro_batches_per_step": size / 8,
        "seconds_per_step": size / 10,
        "total_bytes": total_bytes,
    }
    of_rows = {"num_samples": rows, "num_tokens": 226 * rows, "num_steps": num_steps, "first_sample": first_sample}
    return PhasePlan(number=number, learning_rates=rates, **sizes, **of_rows)


def plan_that_moves(**changes):
    """From 8 to 32 rows in three phases."""
    phases = (
        hand_made_phase(1, 8, 0, 10, rates=(1e-05, 1e-04), total_bytes=12 * GIB),
        hand_made_phase(2, 16, 80, 5, rates=(1e-04, 9.5e-05)),
        hand_made_phase(3, 32, 160, 400_000, rates=(9.5e-05, 0.0)),
    )
    moves = {"total_steps": 400_015, "total_samples": 12_800_160, "smallest_batch_size": 8, "num_phases": 3}
    return hand_made_plan(**{**moves, "phases": phases, **changes})


def plan_that_adapts(**changes):
    """8 to 32 rows, by what is measured."""
    unknown = dict.fromkeys(("first_sample", "num_samples", "num_tokens", "num_steps"))
    phases = tuple(replace(hand_made_phase(None, size, 0, 1, rates=None), **unknown) for size in (8, 16, 32))
    unknown = {"total_steps": None, "seconds": None}
    between = {"steps_between": (12, 39), "seconds_between": (360.0, 500.0)}
    adapts = {**unknown, **between, "total_samples": 300, "smallest_batch_size": 8, "phases": phases}
    return hand_made_plan(**{**adapts, **changes})


def plan_that_does_not_fit(*, num_long=2):
    """No way fits; every row of more than 1,024 tokens is why."""
    plan = hand_made_plan()
    candidates = tuple(does_not_fit(each) for each in plan.candidates)
    rows = tuple(LongRow(key=7 * n, num_tokens=1400 + n, total_bytes=16 * GIB + n * MIB) for n in range(num_long))
    none = dict.fromkeys(("chosen", "costs", "seconds"))
    return replace(plan, candidates=candidates, reason="no way fits", too_long=rows, **none)
