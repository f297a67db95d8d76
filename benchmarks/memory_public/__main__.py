"""Predicted memory against public measurements: the table, and benchmarks/results/memory_public.json.

python -m benchmarks.memory_public [ID ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import transformers

from benchmarks.memory_public.answer import AnswerRow, read_answer_rows
from benchmarks.memory_public.answer_predict import predict_answer
from benchmarks.memory_public.judge import Judged, JudgedAnswer, Verdict, answer_verdict, verdicts
from benchmarks.memory_public.predict import predict_row
from benchmarks.memory_public.rows import Row, read_rows
from benchmarks.memory_public.suite import ASKED, KNOWN, SuiteResult, predict_suite
from benchmarks.memory_public.workloads import NotTracedError
from benchmarks.report import print_table, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where a goal is missed. Only a run over all rows is written down."""
    parser = argparse.ArgumentParser(description="Predicted memory against public measurements.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows of gpu_memory_a100.csv; all of all if none is given")
    ids = parser.parse_args(arguments).ids
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
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
    if not ids:
        answers = [_judge_answer(row) for row in read_answer_rows()]
        lines.append(answer_verdict(answers))
        _print_answers(answers)
        suite = predict_suite()
        print(f"informative: {KNOWN} explains {ASKED} to {suite.error:+.2%} of reserved memory")
    _print_goals(lines)
    if not ids:
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
                "why": "GPTQ with FSDP: how the packed integers are cut is not traced",
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
