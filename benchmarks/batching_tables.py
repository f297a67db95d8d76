"""Print the batching benchmarks' figures for people."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.batching_budgets import BudgetRun
from benchmarks.batching_epoch import Contender, Trial
from benchmarks.batching_padding import Padding
from benchmarks.batching_planning import PlanTime
from benchmarks.loop_overhead import Overhead
from benchmarks.report import print_table

_GIB = 2**30


def show_trials(trials: Sequence[Trial]) -> None:
    print_table(
        "the peer's hand search",
        ("way", "micro-batch", "accumulated", "tokens/s"),
        [(t.way, str(t.micro_batch_rows), str(t.accumulation_steps), _figure(t.tokens_per_s, ",.0f")) for t in trials],
    )


def show_contenders(found: Sequence[Contender]) -> None:
    print_table(
        "one epoch (goal: brim is at least so many times faster)",
        ("", "micro-batch", "seconds", "whole", "brim is faster", "goal", "tokens/s", "padding", "updates",
         "losses differ by", "mean loss", "held out", "peak GiB", ""),
        [
            (c.name, "–" if c.micro_batch_rows is None else str(c.micro_batch_rows), f"{c.train_s:.1f}",
             f"{c.whole_s:.1f}", f"{c.brim_is_faster:.2f}×", _figure(c.goal, ".1f"), f"{c.tokens_per_s:,.0f}",
             f"{c.padding:.2f}", str(c.num_updates), _figure(c.loss_difference, ".1e"), f"{c.mean_loss:.4f}",
             _figure(c.held_out_loss, ".4f"), f"{c.peak_bytes / _GIB:.2f}",
             "met" if c.is_met else "NOT MET")
            for c in found
        ],
    )  # fmt: skip


def show_budgets(runs: Sequence[BudgetRun]) -> None:
    print_table(
        "losses under limits",
        ("", "limit", "GiB of tensors", "promised", "micro-batches", "out of memory", "probes", "losses differ by",
         "goal", ""),
        [
            (r.method, r.limit, f"{r.tensor_bytes / _GIB:.2f}", "" if r.wrong_by is None else f"×{1 / r.wrong_by:g}",
             _figure(r.num_micro_batches, "d"), _figure(r.num_out_of_memory, "d"),
             _figure(r.num_probes_out_of_memory, "d"),
             _figure(r.loss_difference, ".1e"), f"{r.goal:.0e}", "met" if r.is_met else "NOT MET")
            for r in runs
        ],
    )  # fmt: skip


def show_paddings(found: Sequence[Padding]) -> None:
    print_table(
        "padded over real tokens (goal: at most half of the fixed cut's waste)",
        ("fixed rows", "cap GiB", "fixed", "by length", "brim", "brim, largest", "waste over fixed waste"),
        [
            (str(p.fixed_rows), f"{p.cap_bytes / _GIB:.2f}", f"{p.fixed:.3f}", f"{p.fixed_in_order_of_length:.3f}",
             f"{p.brim:.3f}", f"{p.brim_largest:.3f}", f"{p.waste_over_fixed_waste:.3f}")
            for p in found
        ],
    )  # fmt: skip


def show_plan_times(found: Sequence[PlanTime]) -> None:
    print_table(
        "planning (goal: at most 10 s)",
        ("rows", "effective batch", "seconds", "traces cached", "ms to cut a step"),
        [
            (f"{p.num_rows:,}", str(p.effective_batch_size), f"{p.seconds:.2f}", f"{p.seconds_with_caches:.2f}",
             f"{p.cut_ms_per_step:.2f}")
            for p in found
        ],
    )  # fmt: skip


def show_loop(found: Overhead) -> None:
    print_table(
        "brim's loop over a bare loop, by step, where memory suffices",
        ("case", "wall", "95%", "CPU time", "extra ms/step"),
        [
            (found.case, f"{found.wall_ratio:.4f}", "{:.3f}–{:.3f}".format(*found.wall_ratio_interval),
             f"{found.cpu_ratio:.4f}", f"{found.extra_cpu_ms_per_step:.2f}")
        ],
    )  # fmt: skip


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
