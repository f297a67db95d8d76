"""Measure how much memory brim's commands take for data, which none should hold.

    python -m benchmarks.data_memory --bytes 1000000000

`brim check`, `plan`, `train` and `predict` run as people run them, on a file of each format. What a command takes is
its anonymous memory (a copy of the data that is mapped from disk can be given back at any time), seen every few
milliseconds from outside, over that of the same command on a few rows. All rows are read; a sample of them is tokenized
and trained on or answered, so that what is measured is the reading.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from faults.workshop import as_yaml, make_base

from benchmarks.report import print_table, write_report

GOAL_BYTES = 350 * 2**20
FORMATS = ("jsonl", "json", "csv", "parquet")
VERBS = {
    "check": [],
    "plan": [],
    "train": ["--output-directory", "run"],
    "predict": ["--split", "test", "--output", "predicted.jsonl"],
}
_WORDS = ("measure", "large", "data", "before", "it", "is", "read", "whole", "über", "café")
_ANSWER_WORDS = 20
_BATCH_ROWS = 1000
_CONFIG = {
    "model_type": "llm",
    "base_model": "./base",
    "input_features": [{"name": "q", "type": "text"}],
    "output_features": [{"name": "a", "type": "text"}],
    "adapter": {"type": "lora", "r": 2},
    "generation": {"max_new_tokens": 2, "do_sample": False},
    "trainer": {"type": "finetune", "train_steps": 2, "batch_size": 4, "effective_batch_size": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold what one command took for one file."""

    verb: str
    format: str
    file_bytes: int
    anonymous_bytes: int  # at the peak, over that of a few rows
    cpu_s: float


def write_data(path: Path, num_bytes: int, *, row_characters: int = 600) -> None:
    """Write rows of `q` and `a` in the format of the ending, until they take about this many bytes as text."""
    writers: dict[str, Callable[[Path, Iterator[list[dict[str, str]]]], None]] = {
        ".jsonl": _write_jsonl,
        ".json": _write_json,
        ".csv": _write_csv,
        ".parquet": _write_parquet,
    }
    writers[path.suffix](path, _batches(num_bytes, row_characters))


# Runs the command line and tells its CPU seconds on its last line of stderr.
_RUN = """
import resource, sys
from brim.cli import main
from brim.data.read import spill
spill.SPILL_BYTES = int(sys.argv.pop(1)) or spill.SPILL_BYTES
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, file=sys.stderr)
"""


def peak_of(verb: str, path: Path, *, num_rows: int, spill_bytes: int = 0) -> tuple[int, float]:
    """Return the anonymous bytes at the peak of a command on a file, and its CPU seconds.

    num_rows: a sample that is tokenized. spill_bytes: of data that may stay in memory; 0: as brim has it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_base(folder / "base", max_position_embeddings=1024)
        config = {**_CONFIG, "preprocessing": {"sample_size": num_rows}}
        (folder / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
        line = [sys.executable, "-c", _RUN, str(spill_bytes), verb, "config.yaml", "--dataset", str(path)]
        process = subprocess.Popen(
            [*line, *VERBS[verb]],
            cwd=folder,
            env={**os.environ, "BRIM_CACHE_DIR": str(folder / "cache")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(0.005)
        _, told = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{verb} of {path.name} ended with {process.returncode}: {told}")
    return peak, float(told.splitlines()[-1])


def growth_of(verb: str, path: Path, *, num_rows: int, spill_bytes: int = 0) -> Measured:
    """Return what a file takes over what a few rows of it take."""
    with tempfile.TemporaryDirectory() as folder:
        few = Path(folder) / f"few{path.suffix}"
        write_data(few, 50_000)
        least, _ = peak_of(verb, few, num_rows=num_rows, spill_bytes=spill_bytes)
    peak, cpu_s = peak_of(verb, path, num_rows=num_rows, spill_bytes=spill_bytes)
    size = path.stat().st_size
    return Measured(
        verb=verb, format=path.suffix[1:], file_bytes=size, anonymous_bytes=max(0, peak - least), cpu_s=round(cpu_s, 2)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bytes", type=int, default=10**9, help="of each file, as text")
    parser.add_argument("--rows", type=int, default=1000, help="that are tokenized")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    asked = parser.parse_args(arguments)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for ending in asked.formats:
            path = Path(folder) / f"data.{ending}"
            write_data(path, asked.bytes)
            found += [growth_of(verb, path, num_rows=asked.rows) for verb in VERBS]
            path.unlink()
    rows = [
        (f"{each.verb} {each.format}", f"{each.anonymous_bytes / 2**20:,.0f} MiB", f"{each.cpu_s:,.1f} s")
        for each in found
    ]
    print_table(f"{asked.bytes:,} bytes of data", ("", "memory", "CPU"), rows)
    figures = {"goal_bytes": GOAL_BYTES, "num_rows_tokenized": asked.rows, "measured": [asdict(each) for each in found]}
    write_report("data_memory", figures=figures, num_threads=1)


def _anonymous_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def _batches(num_bytes: int, row_characters: int) -> Iterator[list[dict[str, str]]]:
    """Give rows of which no two are the same, some at once."""
    number, left = 0, num_bytes
    text = " ".join(_WORDS) + " "
    answer = " ".join(_WORDS * 2)[: _ANSWER_WORDS * 6]
    while left > 0:
        rows = []
        for _ in range(_BATCH_ROWS):
            question = f"{number} " + (text * (row_characters // len(text) + 1))[number % 40 : row_characters]
            rows.append({"q": question, "a": f"{answer} {number}."})
            number += 1
            left -= len(question) + len(answer) + 20
            if left <= 0:
                break
        yield rows


def _write_jsonl(path: Path, batches: Iterator[list[dict[str, str]]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for rows in batches:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_json(path: Path, batches: Iterator[list[dict[str, str]]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        sign = "["
        for rows in batches:
            for row in rows:
                file.write(f"{sign}{json.dumps(row, ensure_ascii=False)}")
                sign = ", "
        file.write("]")


def _write_csv(path: Path, batches: Iterator[list[dict[str, str]]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["q", "a"])
        writer.writeheader()
        for rows in batches:
            writer.writerows(rows)


def _write_parquet(path: Path, batches: Iterator[list[dict[str, str]]]) -> None:
    """Write one row group for all, as careless writers do."""
    table = pa.concat_tables([pa.Table.from_pylist(rows) for rows in batches])
    pq.write_table(table, path, row_group_size=len(table), compression="none", use_dictionary=False)


if __name__ == "__main__":
    main()
