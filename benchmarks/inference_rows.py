"""The peak of `brim predict` with ten times the rows: what it keeps of each row beside the batch that is generated.

    python -m benchmarks.inference_rows PEAK predict …

is `brim` with a note of its peak in a file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.batching_run import ROOT, RunFailed, last_words
from benchmarks.inference_run import peak_bytes
from benchmarks.inference_subject import Subject

NUM_ROWS, TIMES = 3000, 10
_BATCH_ROWS = 64  # by hand: brim's own plan would take more rows together where there are more
_NEW_TOKENS = 4
_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Of one process."""

    num_rows: int
    peak_bytes: int  # resident
    input_bytes: int
    seconds: float


def peaks(subject: Subject, folder: Path, *, num_rows: int = NUM_ROWS, num_threads: int) -> list[Peak]:
    """With so many rows, and with ten times as many, by a model that is next to nothing."""
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
    """For the record."""
    few, many = found
    return {
        "num_rows": [few.num_rows, many.num_rows],
        "peak_bytes": [few.peak_bytes, many.peak_bytes],
        "input_bytes": [few.input_bytes, many.input_bytes],
        "growth": round(many.peak_bytes / few.peak_bytes - 1, 4),
        "bytes_a_row": round((many.peak_bytes - few.peak_bytes) / (many.num_rows - few.num_rows), 1),
        "seconds": [few.seconds, many.seconds],
    }


def _make_base(subject: Subject, base: Path) -> None:
    """The subject's tokenizer with a model of random weights."""
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
    noted = folder / f"{num_rows}.peak"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.inference_rows", str(noted), "predict", str(folder / "config.yaml"),
         "--dataset", str(prompts), "--output", str(folder / f"{num_rows}.out.jsonl"), "--json"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(num_threads)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(f"brim predict ended with {done.returncode}: {last_words(done.stderr)}")
    return Peak(
        num_rows=num_rows,
        peak_bytes=int(noted.read_text(encoding="ascii")),
        input_bytes=prompts.stat().st_size,
        seconds=round(json.loads(done.stdout)["seconds"], 2),
    )


def main() -> None:
    from brim.cli.main import main as brim

    noted = Path(sys.argv[1])
    sys.argv = ["brim", *sys.argv[2:]]
    try:
        brim()
    finally:
        noted.write_text(str(peak_bytes()), encoding="ascii")


if __name__ == "__main__":
    main()
