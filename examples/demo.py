"""Fine-tune the small base model on Python's standard library, and see what that brought: `make demo`.

Everything goes to demo-output/. Each brim command is printed before it runs, to be tried by hand.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from brim.infer.bootstrap import Interval, ratio_interval
from stdlib_code.dataset import TEST, Row, instruction_rows, stdlib_modules, write_jsonl

ROOT = Path(__file__).parents[1]
CONFIG = Path("examples/stdlib_code/config.yaml")
OUTPUT = Path("demo-output")
NUM_PREDICTED = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One metric of both models on the same rows, each with its 95% interval over rows."""

    name: str
    base: float
    base_interval: Interval
    tuned: float
    tuned_interval: Interval
    difference: float  # tuned - base
    difference_interval: Interval


def main() -> None:
    seconds: dict[str, float] = {}
    data, test, run = OUTPUT / "train.jsonl", OUTPUT / "test.jsonl", OUTPUT / "run"
    rows_of_base, rows_of_tuned = OUTPUT / "base_rows.parquet", OUTPUT / "tuned_rows.parquet"
    predictions = OUTPUT / "predictions.jsonl"
    _remove(run, rows_of_base, rows_of_tuned, predictions)
    test_rows = _write_data()
    seconds["train"] = _brim("train", CONFIG, "--dataset", data, "--output-directory", run)
    seconds["evaluate base"] = _brim("evaluate", CONFIG, "--dataset", test, "--rows", rows_of_base)
    seconds["evaluate tuned"] = _brim("evaluate", run, "--dataset", test, "--rows", rows_of_tuned)
    seconds["predict"] = _brim("predict", run, "--dataset", OUTPUT / "to_predict.jsonl", "--output", predictions)
    base, tuned = (pd.read_parquet(ROOT / path) for path in (rows_of_base, rows_of_tuned))
    _print_predictions(ROOT / predictions)
    print(f"\n== {len(base):,} of {test_rows:,} held-out rows, from modules that neither model has seen ==\n")
    print(table(compare(base, tuned)))
    print("\nwall time: " + ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items()))
    _print_places()


def compare(base: pd.DataFrame, tuned: pd.DataFrame) -> list[Figure]:
    """Loss, perplexity and token accuracy from the row figures of `brim evaluate --rows`.

    Both models are scored on the same tokens, so that the difference of two means is the mean of the differences: its
    interval is that of a paired comparison.
    """
    assert base["row"].equals(tuned["row"])
    assert base["num_supervised"].equals(tuned["num_supervised"])
    loss = _figure("loss", base["loss"].to_numpy(), tuned["loss"].to_numpy(), base["num_supervised"].to_numpy())
    accuracy = _figure(
        "token accuracy",
        base["num_correct"].to_numpy(),
        tuned["num_correct"].to_numpy(),
        base["num_supervised"].to_numpy(),
    )
    return [loss, accuracy]


def table(figures: list[Figure]) -> str:
    lines = [f"{'':<16}{'base':<28}{'fine-tuned':<28}difference, paired"]
    for figure in figures:
        cells = [
            _cell(figure.base, figure.base_interval),
            _cell(figure.tuned, figure.tuned_interval),
            _cell(figure.difference, figure.difference_interval, sign="+"),
        ]
        lines.append(f"{figure.name:<16}" + "".join(f"{cell:<28}" for cell in cells).rstrip())
        if figure.name == "loss":
            lines.append(f"{'perplexity':<16}{math.exp(figure.base):<28.2f}{math.exp(figure.tuned):.2f}")
    return "\n".join([*lines, "", "In brackets: 95% intervals, bootstrap over rows. Loss in nats a token."])


def _figure(name: str, base: NDArray[np.float64], tuned: NDArray[np.float64], num_tokens: NDArray[np.int64]) -> Figure:
    total = num_tokens.sum()
    return Figure(
        name=name,
        base=base.sum() / total,
        base_interval=ratio_interval(base, num_tokens),
        tuned=tuned.sum() / total,
        tuned_interval=ratio_interval(tuned, num_tokens),
        difference=(tuned - base).sum() / total,
        difference_interval=ratio_interval(tuned - base, num_tokens),
    )


def _cell(value: float, interval: Interval, *, sign: str = "") -> str:
    return f"{value:{sign}.4f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _remove(run: Path, *files: Path) -> None:
    """Make room: brim writes over nothing, not even over what the demo before this one made."""
    shutil.rmtree(ROOT / run, ignore_errors=True)
    for file in files:
        (ROOT / file).unlink(missing_ok=True)


def _write_data() -> int:
    """Write rows to learn from, all test rows, and some of them to predict; the number of test rows."""
    print("== docstring and signature -> source, from the Python standard library ==\n")
    rows = instruction_rows(stdlib_modules())
    test = [row for row in rows if row.split == TEST]
    files: dict[str, list[Row]] = {
        "train.jsonl": [row for row in rows if row.split != TEST],
        "test.jsonl": test,
        "to_predict.jsonl": test[:: math.ceil(len(test) / NUM_PREDICTED)],
    }
    for name, content in files.items():
        write_jsonl(content, ROOT / OUTPUT / name)
        print(f"{OUTPUT / name}: {len(content):,} rows")
    return len(test)


def _brim(*arguments: str | Path) -> float:
    """Run a brim command in the repository's root; its wall time in seconds."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ brim {shlex.join(words)}", flush=True)
    started = time.perf_counter()
    done = subprocess.run([str(Path(sys.executable).with_name("brim")), *words], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return time.perf_counter() - started


def _print_predictions(path: Path) -> None:
    """The two shortest tasks of those that were predicted."""
    with path.open(encoding="utf-8") as file:
        predictions = [json.loads(line) for line in file]
    for row in sorted(predictions, key=lambda row: len(row["output"]))[:2]:
        print(f"\n== {row['module']}, {row['qualname']} ==\n\n{row['instruction']}\n")
        print(f"-- as the library has it --\n{row['output']}\n")
        print(f"-- as the fine-tuned model has it --\n{row['output_response']}")


def _print_places() -> None:
    print("\nwhere everything lies:")
    for place, what in {
        "train.jsonl, test.jsonl": "the data",
        "run/": "the run: config.yaml, metrics.jsonl, ledger.parquet, README.md, tensorboard/",
        "run/model/": "the adapter, in PEFT's format, with the tokenizer",
        "base_rows.parquet, tuned_rows.parquet": "loss and hits of each held-out row",
        "predictions.jsonl": "the predictions",
    }.items():
        print(f"  {OUTPUT}/{place:<40}{what}")


if __name__ == "__main__":
    main()
