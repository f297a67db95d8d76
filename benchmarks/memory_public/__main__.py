"""Compare predictions with public measurements: the table, and benchmarks/results/memory_public.json.

python -m benchmarks.memory_public [--data DIR] [ID ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.memory_public.answer import AnswerRow, read_answer_rows
from benchmarks.memory_public.answer_predict import predict_answer
from benchmarks.memory_public.judge import Judged, JudgedAnswer, Verdict, answer_verdicts, verdicts
from benchmarks.memory_public.predict import predict_row
from benchmarks.memory_public.rows import DATA, Row, read_rows
from benchmarks.memory_public.suite import ASKED, KNOWN, SuiteResult, predict_suite, read_suite_rows
from benchmarks.memory_public.workloads import NotTracedError
from benchmarks.report import print_table, write_report
from brim import InputError
from brim.errors import Problem

_LEFT_OUT = "GPTQ with FSDP: how the packed integers are cut is not traced"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a goal is missed, 2 where the measurements cannot be read.

    Only a run over all rows of brim's own measurements is written down.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_public", description="Predicted memory against public measurements."
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows of gpu_memory_a100.csv; all of all if none is given")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="other measurements, in a folder like benchmarks/data/memory"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        return _run(given.ids, given.data)
    except InputError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _run(ids: Sequence[str], given: Path | None) -> int:
    data = given or DATA
    rows = [row for row in read_rows(data) if not ids or row.id in ids]
    answer_rows, suite_rows = ([], None) if ids else (read_answer_rows(data), read_suite_rows(data))
    judged: list[Judged] = []
    left_out: list[Row] = []
    for row in rows:
        _judge(row, judged, left_out)
    answers = [_judge_answer(row) for row in answer_rows]
    lines = [*verdicts(judged), *answer_verdicts(answers)]
    if not lines:
        raise InputError(
            Problem(what="no row of that name that can be traced" if ids else f"{data} has no row that can be traced")
        )
    if judged:
        _print_rows(judged)
    if left_out:
        print(f"left out: {', '.join(row.id for row in left_out)} ({_LEFT_OUT})")
    if answers:
        _print_answers(answers)
    suite = None if suite_rows is None else predict_suite(suite_rows)
    if suite is not None:
        print(f"informative: {KNOWN} explains {ASKED} to {suite.error:+.2%} of reserved memory")
    _print_goals(lines)
    if suite is not None and given is None:
        _write(judged, left_out, answers, suite, lines)
    return 0 if all(line.met for line in lines) else 1


def _judge_answer(row: AnswerRow) -> JudgedAnswer:
    predicted = predict_answer(row)
    num_bytes = predicted.reserved_bytes if row.metric == "reserved" else predicted.allocated_bytes
    return JudgedAnswer(row=row, predicted_bytes=num_bytes)


def _judge(row: Row, judged: list[Judged], left_out: list[Row]) -> None:
    try:
        judged.append(Judged(row=row, predicted=predict_row(row)))
    except NotTracedError:
        left_out.append(row)


def _print_rows(judged: Sequence[Judged]) -> None:
    print_table(
        "Peak allocated (bytes)",
        ("row", "run", "batch", "GPUs", "predicted", "measured", "error", "end error", "fits"),
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


def _print_answers(answers: Sequence[JudgedAnswer]) -> None:
    print_table(
        "Answer.AI, FSDP on two GPUs (bytes of one)",
        ("row", "model", "batch", "strategy", "metric", "predicted", "measured", "error"),
        [
            (
                each.row.id,
                each.row.model,
                str(each.row.batch_size),
                each.row.strategy,
                each.row.metric,
                f"{each.predicted_bytes:,}",
                f"{each.row.measured_bytes:,}",
                f"{each.error:+.2%}",
            )
            for each in answers
        ],
    )


def _print_goals(lines: Sequence[Verdict]) -> None:
    print_table(
        "Goals",
        ("what", "rows", "reached", "goal", ""),
        [(line.what, str(line.rows), line.reached, line.goal, "met" if line.met else "MISSED") for line in lines],
    )


def _write(
    judged: Sequence[Judged],
    left_out: Sequence[Row],
    answers: Sequence[JudgedAnswer],
    suite: SuiteResult,
    lines: Sequence[Verdict],
) -> None:
    path = write_report(
        "memory_public",
        num_threads=1,
        figures={
            "goals": [
                {"what": line.what, "rows": line.rows, "reached": line.reached, "goal": line.goal, "met": line.met}
                for line in lines
            ],
            "left_out": {
                "why": _LEFT_OUT,
                "rows": [row.id for row in left_out],
            },
            "rows": [each.as_dict() for each in judged],
            "answer_rows": [each.as_dict() for each in answers],
            "informative": {
                "what": f"reserved by {ASKED}, at the length of rows at which {KNOWN} is right",
                "tokens": suite.tokens,
                "measured_bytes": suite.measured_bytes,
                "predicted_bytes": suite.predicted_bytes,
                "error": suite.error,
            },
        },
    )
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    sys.exit(main())
