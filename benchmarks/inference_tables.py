"""Print what the inference benchmark measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.inference_limited import Room
from benchmarks.inference_resumed import Resumed
from benchmarks.inference_rows import Peak
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


def show_rooms(found: Sequence[Room]) -> None:
    columns = ("room, MiB", "", "rows", "of the largest", "out of memory", "probes", "s")
    rows = [
        (
            str(room.room_bytes >> 20),
            name,
            "none" if each.rows is None else str(each.rows),
            f"{each.rows / room.largest:.1%} of {room.largest}" if name == "brim" and each.rows else "",
            str(each.num_out_of_memory),
            str(each.num_probes),
            f"{each.seconds:.1f}",
        )
        for room in found
        for name, each in room.found.items()
    ]
    print_table("rows of the first batch under a real limit", columns, rows)


def show_resumed(found: Resumed) -> None:
    columns = ("kills", "equal file", "rows in a batch", "repeated: most", "of each process", "noted rows done twice")
    each = ", ".join(map(str, found.rows_repeated))
    row = (
        str(found.num_kills),
        "yes" if found.is_equal else "no",
        str(found.batch_rows),
        str(max(found.rows_repeated)),
        each,
        str(found.num_generated_twice),
    )
    print_table("killed at random moments", columns, [row])


def show_growth(found: Sequence[Peak]) -> None:
    columns = ("rows", "peak, MiB", "without the data, MiB", "s")
    rows = [
        (
            f"{each.num_rows:,}",
            f"{each.peak_bytes / 2**20:,.1f}",
            f"{each.without_data_bytes / 2**20:,.1f}",
            f"{each.seconds:.1f}",
        )
        for each in found
    ]
    print_table("ten times the rows", columns, rows)
