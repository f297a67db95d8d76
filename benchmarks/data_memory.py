"""Measure how much memory brim takes for data: checking, training and predicting read it; none should hold it.

    python -m benchmarks.data_memory --bytes 200000000

Each format is read by a process of its own, which prepares the rows as the command does; what it takes is its anonymous
memory (a copy of the data that is mapped from disk can be given back at any time), seen every few milliseconds from
outside, over that of the same process on a few rows. A sample of the rows is tokenized, so that what is measured is
the reading. Training reads and prepares as planning does.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import print_table, write_report

GOAL_BYTES = 350 * 2**20
FORMATS = ("jsonl", "json", "csv", "parquet")
VERBS = ("check", "train", "predict")
_WORDS = ("measure", "large", "data", "before", "it", "is", "read", "whole", "über", "café")
_ANSWER_WORDS = 20
_BATCH_ROWS = 1000


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


def peak_of(verb: str, path: Path, *, num_rows: int, spill_bytes: int | None = None) -> tuple[int, float]:
    """Return the anonymous bytes at the peak of a process that prepares a file, and its CPU seconds.

    num_rows: a sample that is tokenized. spill_bytes: of data that may stay in memory; None: as brim has it.
    """
    with tempfile.TemporaryDirectory() as cache:
        line = [sys.executable, "-m", "benchmarks.data_memory", "--prepare", verb, str(path), str(num_rows)]
        line += [] if spill_bytes is None else ["--spill", str(spill_bytes)]
        process = subprocess.Popen(line, env={**os.environ, "BRIM_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(0.005)
        out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{verb} of {path.name} ended with {process.returncode}")
    return peak, float(json.loads(out)["cpu_s"])


def growth_of(verb: str, path: Path, *, num_rows: int, spill_bytes: int | None = None) -> Measured:
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
    parser.add_argument("--prepare", nargs=3, metavar=("VERB", "FILE", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--spill", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.prepare:
        verb, file, num_rows = asked.prepare
        _prepare(verb, Path(file), int(num_rows), asked.spill)
        return
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


def _prepare(verb: str, path: Path, num_rows: int, spill_bytes: int | None) -> None:
    """Do what a command does with data, in this process."""
    from brim.config.schema import Config
    from brim.data import check_data, prepare, prompts_of
    from brim.data.read import read, spill
    from brim.data.tokens import load_encoder
    from brim.models.folders import locate

    if spill_bytes is not None:
        spill.SPILL_BYTES = spill_bytes
    with tempfile.TemporaryDirectory() as folder:
        encoder = load_encoder(locate(str(_tokenizer(Path(folder))), initialize="random"))
        config = Config.model_validate(
            {
                "base_model": "base",
                "input_features": [{"name": "q", "type": "text"}],
                "output_features": [{"name": "a", "type": "text"}],
                "preprocessing": {"sample_size": num_rows},
                "trainer": {"type": "finetune"},
                "adapter": "lora",
            }
        )
        source = read(path)
        if verb == "check":
            check_data(config, source, encoder, context_length=None)
        elif verb == "train":
            prepare(source, config, encoder, context_length=None)
        else:
            prompts_of(source, config, encoder, only="test")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu_s": usage.ru_utime + usage.ru_stime}))


def _tokenizer(folder: Path) -> Path:
    """Return the folder of a base model without weights whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    return folder


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
