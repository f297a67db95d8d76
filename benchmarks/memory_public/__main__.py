"""Predicted memory against public measurements: the table, and benchmarks/results/memory_public.json.

python -m benchmarks.memory_public [ID ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.memory_public.judge import Judged, verdicts
from benchmarks.memory_public.predict import predict_row
from benchmarks.memory_public.rows import Row, read_rows
from benchmarks.memory_public.workloads import NotTracedError
from benchmarks.report import print_table, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a goal is missed. Only a run over all rows is written down."""
    parser = argparse.ArgumentParser(description="Predicted memory against public measurements.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows of gpu_memory_a100.csv; all if none is given")
    ids = parser.parse_args(arguments).ids
    torch.set_num_threads(1)
    started = time.perf_counter()
    judged: list[Judged] = []
    left_out: list[Row] = []
    for row in read_rows():
        if not ids or row.id in ids:
            _judge(row, judged, left_out)
    if not judged:
        print("no row of that name that can be traced", file=sys.stderr)
        return 2
    _print_rows(judged)
    lines = verdicts(judged)
    print_table(
        "Goals",
        ("what", "rows", "reached", "goal", ""),
        [(line.what, str(line.rows), line.reached, line.goal, "met" if line.met else "MISSED") for line in lines],
    )
    if not ids:
        _write(judged, left_out, time.perf_counter() - started)
    return 0 if all(line.met for line in lines) else 1


def _judge(row: Row, judged: list[Judged], left_out: list[Row]) -> None:
    try:
        judged.append(Judged(row=row, predicted=predict_row(row)))
    except NotTracedError:
        left_out.append(row)


def _print_rows(judged: Sequence[Judged]) -> None:
    print_table(
        "Peak allocated (bytes)",
        ("row", "run", "batch", "GPUs", "predicted", "measured", "error", "end error", "fits 80 GB"),
        [
            (
                each.row.id,
                f"{each.row.model.split('/')[1]} {each.row.method}, {each.row.kernels}, {each.row.precision}",
                str(each.row.batch_size),
                str(each.row.gpus),
                f"{each.predicted.allocated_bytes:,}",
                f"{each.row.peak_allocated_bytes:,}" if each.row.peak_allocated_bytes else "failed",
                "" if each.peak_error is None else f"{each.peak_error:+.4%}",
                "" if each.end_error is None else f"{each.end_error:+.4%}",
                "yes" if each.predicted.fits else "no",
            )
            for each in judged
        ],
    )


def _write(judged: Sequence[Judged], left_out: Sequence[Row], seconds: float) -> None:
    lines = verdicts(judged)
    path = write_report(
        "memory_public",
        num_threads=1,
        figures={
            "seconds": round(seconds, 1),
            "goals": [
                {"what": line.what, "rows": line.rows, "reached": line.reached, "goal": line.goal, "met": line.met}
                for line in lines
            ],
            "left_out": {
                "why": "kernels that are not traced: AutoGPTQ's, written in Triton",
                "rows": [row.id for row in left_out],
            },
            "rows": [each.as_dict() for each in judged],
        },
    )
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    sys.exit(main())
