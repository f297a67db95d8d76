"""Measure the peak of `brim predict` with ten times the rows: what it keeps of each row beside the current batch.

Up to 64 MiB of each table of data stay in memory, beyond that it lies on disk. So there are two figures: the resident
peak, data included; and what is not of files at its peak, with all data on disk.

    python -m benchmarks.inference_rows NOTE SPILL_BYTES predict …

is `brim` with a note of its peaks in a file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.batching_run import ROOT, RunFailed, last_words
from benchmarks.inference_run import peak_bytes, status_bytes
from benchmarks.inference_subject import Subject
from brim.data.read.spill import SPILL_BYTES

NUM_ROWS, TIMES = 10_000, 10
_BATCH_ROWS = 64  # by hand: brim's own plan would take more rows together where there are more
_NEW_TOKENS = 2
_LOOK_S = 0.02
_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Hold the peak of one process."""

    num_rows: int
    peak_bytes: int  # resident
    without_data_bytes: int  # resident and not of files, with all data on disk
    input_bytes: int
    seconds: float


def peaks(subject: Subject, folder: Path, *, num_rows: int = NUM_ROWS, num_threads: int) -> list[Peak]:
    """Measure so many rows, and ten times as many, with a model that takes next to nothing."""
    folder.mkdir()
    _make_base(subject, folder / "base")
    settings = {
        **subject.settings(max_new_tokens=_NEW_TOKENS),
        "base_model": str(folder / "base"),
        "trainer": {"type": "none", "batch_size": _BATCH_ROWS},
    }
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "config.json").rename(folder / "config.yaml")  # JSON is YAML
    return [_peak(subject, folder, count, num_threads) for count in (num_rows, TIMES * num_rows)]


def summary(found: list[Peak]) -> dict[str, Any]:
    """Return the figures for the record."""
    few, many = found
    more_rows = many.num_rows - few.num_rows
    return {
        "num_rows": [few.num_rows, many.num_rows],
        "peak_bytes": [few.peak_bytes, many.peak_bytes],
        "input_bytes": [few.input_bytes, many.input_bytes],
        "growth": round(many.peak_bytes / few.peak_bytes - 1, 4),
        "bytes_a_row": round((many.peak_bytes - few.peak_bytes) / more_rows, 1),
        "without_data_bytes": [few.without_data_bytes, many.without_data_bytes],
        "growth_without_data": round(many.without_data_bytes / few.without_data_bytes - 1, 4),
        "bytes_a_row_without_data": round((many.without_data_bytes - few.without_data_bytes) / more_rows, 1),
        "seconds": [few.seconds, many.seconds],
    }


def _make_base(subject: Subject, base: Path) -> None:
    """Write the subject's tokenizer with a model of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(subject.model, base)
    (base / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(base, **_SHAPE, num_key_value_heads=2, head_dim=16, dtype="float32")
    LlamaForCausalLM(config).save_pretrained(base)


def _peak(subject: Subject, folder: Path, num_rows: int, num_threads: int) -> Peak:
    lines = subject.lines()
    prompts = folder / f"{num_rows}.jsonl"
    with prompts.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            file.write(lines[number % len(lines)])
    peak = _predict(folder, prompts, num_threads, spill_bytes=SPILL_BYTES)
    return Peak(
        num_rows=num_rows,
        peak_bytes=peak["resident"],
        without_data_bytes=_predict(folder, prompts, num_threads, spill_bytes=0)["anonymous"],
        input_bytes=prompts.stat().st_size,
        seconds=peak["seconds"],
    )


def _predict(folder: Path, prompts: Path, num_threads: int, *, spill_bytes: int) -> dict[str, Any]:
    noted, output = folder / "note", folder / f"{prompts.stem}.{spill_bytes}.out.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.inference_rows", str(noted), str(spill_bytes), "predict",
         str(folder / "config.yaml"), "--dataset", str(prompts), "--output", str(output), "--json"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(num_threads)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(f"brim predict ended with {done.returncode}: {last_words(done.stderr)}")
    return {**json.loads(noted.read_text("ascii")), "seconds": round(json.loads(done.stdout)["seconds"], 2)}


def main() -> None:
    from brim.cli import main as brim
    from brim.data.read import spill

    noted, spill.SPILL_BYTES = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv = ["brim", *sys.argv[3:]]
    anonymous: list[int] = []
    threading.Thread(target=_watch, args=(anonymous,), daemon=True).start()
    try:
        brim()
    finally:
        noted.write_text(json.dumps({"resident": peak_bytes(), "anonymous": max(anonymous)}), encoding="ascii")


def _watch(anonymous: list[int]) -> None:
    while True:
        anonymous[:] = [max([*anonymous, status_bytes("RssAnon")])]
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
