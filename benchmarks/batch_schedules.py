"""Compare constant, ramped and noise-driven batches on the demo's data: `python -m benchmarks.batch_schedules`.

Four configurations of examples/batch_schedules/ through `brim compare`, on equal tokens, five seeds each. The runs go
to demo-output/batch-schedules/, where a second call goes on; the picture to docs/.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = [f"examples/batch_schedules/{name}.yaml" for name in ("constant-8", "constant-64", "ramp", "noise-driven")]
OUTPUT = Path("demo-output")
PICTURE = ROOT / "docs" / "batch-schedules.png"
NUM_THREADS = 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1000, help="of the demo's 1,986, drawn anew for each seed")
    parser.add_argument("--output-directory", type=Path, default=OUTPUT / "batch-schedules")
    given = parser.parse_args(arguments)

    import brim
    from benchmarks.report import write_report

    result = brim.compare(
        CONFIGS,
        dataset=_data(),
        seeds=given.seeds,
        output_directory=given.output_directory,
        resume=(given.output_directory / "compare.json").exists(),
        overrides=[f"preprocessing.sample_size={given.rows}"],
        say=lambda line: print(line, file=sys.stderr),
    )
    print(result.markdown())
    figures = {key: value for key, value in result.as_json().items() if key != "format"}
    print(write_report("batch_schedules", figures=figures, num_threads=NUM_THREADS))
    shutil.copyfile(given.output_directory / "curves.png", PICTURE)


def _data() -> Path:
    """Return the demo's rows to learn from."""
    sys.path.insert(0, str(ROOT / "examples"))
    from stdlib_code.dataset import TEST, instruction_rows, stdlib_modules, write_jsonl

    path = OUTPUT / "train.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_jsonl([row for row in instruction_rows(stdlib_modules()) if row.split != TEST], path)
    return path


if __name__ == "__main__":
    main()
