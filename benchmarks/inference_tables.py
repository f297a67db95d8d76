"""What the inference benchmark prints."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.inference_speed import Contender, Trial
from benchmarks.report import print_table


def show_trials(trials: Sequence[Trial]) -> None:
    print_table(
        "the hand search",
        ("", "rows", "rows/s", "peak, MiB"),
        [
            (
                trial.way,
                str(trial.batch_rows),
                f"{trial.rows_per_s:.2f}" if trial.rows_per_s else f"failed: {trial.failure}",
                f"{trial.peak_bytes / 2**20:,.0f}" if trial.peak_bytes else "",
            )
            for trial in trials
        ],
    )


def show_contenders(found: Sequence[Contender]) -> None:
    columns = ("", "rows", "rows/s", "s", "in all, s", "brim is faster", "in all", "goal", "equal rows", "peak, MiB")
    rows = [
        (
            each.name,
            "plan" if each.batch_rows is None else str(each.batch_rows),
            f"{each.rows_per_s:.2f}",
            f"{each.generate_s:.1f}",
            f"{each.whole_s:.1f}",
            f"{each.brim_is_faster:.2f}",
            f"{each.brim_is_faster_in_all:.2f}",
            "" if each.goal is None else f"≥ {each.goal:g}{'' if each.is_met else ', missed'}",
            str(each.rows_equal),
            f"{each.peak_bytes / 2**20:,.0f}",
        )
        for each in found
    ]
    print_table("rows a second", columns, rows)
