"""Train LoRA on a base of 32, 8 and 4 bits: losses before and after, across micro-batches, and of the 8-bit kernels.

    python -m benchmarks.quantized_bases

examples/stdlib_code/qlora.yaml on 200 short rows of the demo's data, scored on 100 rows that neither model has seen.
On a CPU bitsandbytes has two kernels for 8 bits; brim takes the one that leaves activations as they are, a GPU has the
other alone. Nothing here is a matter of speed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import brim
from benchmarks.report import print_table, write_report

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "stdlib_code"
BASES: Mapping[str, str] = {"32 bits": "null", "8 bits": "{bits: 8}", "4 bits": "{bits: 4}"}
NUM_TRAIN, NUM_TEST, MAX_CHARACTERS = 200, 100, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Hold one base."""

    base: str
    loss_before: float  # nats a token, of the test rows, in fp32
    loss_after: float
    spread_fp32: float  # largest relative difference of a step's loss, micro-batches of 4 and 8 against 1
    spread_bf16: float


def main() -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    with tempfile.TemporaryDirectory() as folder:
        data = _data(Path(folder))
        figures = [_figure(data, Path(folder), base) for base in BASES]
        kernels = {"as brim has it": _eight_bits(data)}
        with _kernel_of_a_gpu():
            kernels["activations quantised, too"] = _eight_bits(data)
            spread = _spread(data, Path(folder) / "int8", "8 bits", "fp32")
    columns = ["base", "loss before", "after", "spread over micro-batches, fp32", "bf16"]
    print_table("LoRA on quantised bases", columns, [_row(figure) for figure in figures])
    print(json.dumps({"8 bits on a CPU, evaluated": kernels, "spread with activations quantised": spread}, indent=1))
    write_report(
        "quantized_bases",
        figures={"runs": [asdict(figure) for figure in figures], "kernels": kernels, "kernel_spread": spread},
        num_threads=1,
    )


def _figure(data: Path, folder: Path, base: str) -> Figure:
    model = _model(base, "fp32")
    before = model.evaluate(data, split="test", batch_size=8).metrics["loss"]
    after = model.train(data, output_directory=folder / base).metrics["test"]["loss"]
    spreads = [_spread(data, folder / f"{base}-{name}", base, name) for name in ("fp32", "bf16-true")]
    return Figure(base=base, loss_before=before, loss_after=after, spread_fp32=spreads[0], spread_bf16=spreads[1])


def _spread(data: Path, folder: Path, base: str, precision: str) -> float:
    """Return the spread of the losses of an epoch over a quarter of the rows."""
    sequences: list[list[float]] = []
    for rows in (1, 4, 8):
        changes = [f"trainer.batch_size={rows}", "trainer.skip_all_evaluation=true", "preprocessing.sample_size=72"]
        model = _model(base, precision, "trainer.effective_batch_size=8", *changes)
        model.train(data, output_directory=folder / str(rows))
        lines = (folder / str(rows) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        sequences.append([record["loss"] for record in map(json.loads, lines) if record.get("split") == "train"])
    return max(abs(a - b) / b for other in sequences[1:] for a, b in zip(other, sequences[0], strict=True))


def _eight_bits(data: Path) -> dict[str, float]:
    """Return the test loss in batches of 1 and 4, and for how many of 100 rows greedy texts are equal in both."""
    model = _model("8 bits", "fp32", "trainer={type: none}", "generation.max_new_tokens=24")
    losses = [model.evaluate(data, split="test", batch_size=size).metrics["loss"] for size in (1, 4)]
    texts = [model.predict(data, split="test", batch_size=size).predictions["output_response"] for size in (1, 4)]
    return {"loss_1": losses[0], "loss_4": losses[1], "equal_texts": int((texts[0] == texts[1]).sum())}


@contextmanager
def _kernel_of_a_gpu() -> Iterator[None]:
    from bitsandbytes.autograd._functions import MatMul8bitLt

    def matmul(a: Any, b: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None) -> Any:
        return MatMul8bitLt.apply(a, b, out, bias, state)  # type: ignore[no-untyped-call]

    with patch("bitsandbytes.matmul", matmul):
        yield


def _model(base: str, precision: str, *overrides: str) -> brim.Model:
    folder = f"base_model={EXAMPLE / 'base-model'}"
    given = [folder, f"quantization={BASES[base]}", f"precision={precision}", *overrides]
    return brim.Model(EXAMPLE / "qlora.yaml", overrides=given)


def _data(folder: Path) -> Path:
    from stdlib_code.dataset import TEST, instruction_rows, stdlib_modules

    short = [
        row
        for row in instruction_rows(stdlib_modules())
        if len(row.instruction + row.input + row.output) < MAX_CHARACTERS
    ]
    train = [row for row in short if row.split != TEST]
    test = [row for row in short if row.split == TEST]
    random.seed(0)
    chosen = [(row, 0) for row in random.sample(train, NUM_TRAIN)] + [(row, 2) for row in random.sample(test, NUM_TEST)]
    lines = [json.dumps({**asdict(row), "split": split}) + "\n" for row, split in chosen]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "data.jsonl"


def _row(figure: Figure) -> list[str]:
    losses = [f"{figure.loss_before:.4f}", f"{figure.loss_after:.4f}"]
    return [figure.base, *losses, f"{figure.spread_fp32:.1e}", f"{figure.spread_bf16:.1e}"]


if __name__ == "__main__":
    main()
