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
from pathlib import Path

from stdlib_code.dataset import TEST, Row, instruction_rows, stdlib_modules, write_jsonl

ROOT = Path(__file__).parents[1]
CONFIG = Path("examples/stdlib_code/config.yaml")
OUTPUT = Path("demo-output")
NUM_PREDICTED = 24


def main() -> None:
    seconds: dict[str, float] = {}
    data, test, run = OUTPUT / "train.jsonl", OUTPUT / "test.jsonl", OUTPUT / "run"
    rows, predictions = OUTPUT / "rows.parquet", OUTPUT / "predictions.jsonl"
    _remove(run, rows, predictions)
    test_rows = _write_data()
    seconds["train"] = _brim("train", CONFIG, "--dataset", data, "--output-directory", run)
    seconds["predict"] = _brim("predict", run, "--dataset", OUTPUT / "to_predict.jsonl", "--output", predictions)
    _print_predictions(ROOT / predictions)
    print(
        f"\n== the fine-tuned model and its base on {test_rows:,} held-out rows, from modules that neither has seen =="
    )
    seconds["evaluate both"] = _brim("evaluate", run, "--dataset", test, "--rows", rows, "--against-base")
    print("\nwall time: " + ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items()))
    _print_places()


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
        "rows.parquet": "loss and hits of each held-out row",
        "predictions.jsonl": "the predictions",
    }.items():
        print(f"  {OUTPUT}/{place:<40}{what}")


if __name__ == "__main__":
    main()
