"""Measure the peak memory of generation on this CPU against the prediction, and rows under a real limit.

    python -m benchmarks.inference_memory

Resident: three architectures of some ten million parameters, several caches of R rows × C columns, each run to its end
in a process of its own by brim's own engine with an end token that no vocabulary has, so that every response takes all
its tokens. Predicted is what was resident before the weights and the bytes that live at the trace's peak.

Limited: the same models with a real limit on the address space (RLIMIT_AS). The plan says how many rows run together;
the largest number that runs is found by trying, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.memory_cpu import MODEL
from benchmarks.report import print_table, write_report
from brim.config import load_config
from brim.memory import predict_memory
from brim.models.folders import locate
from brim.workflows.measure.messages import Request
from brim.workflows.measure.run import RETURNED_AT_ONCE, measured_alone

GOAL = 0.10
GOAL_SHARE = 0.95
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": MODEL,
    "qwen3": {  # a large vocabulary, and fewer heads for keys than for queries
        **MODEL,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 65536,
        "hidden_size": 256,
        "intermediate_size": 768,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 16384,
        "n_embd": 384,
        "n_layer": 6,
        "n_head": 6,
        "n_positions": 2048,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Hold prompts of one length, and the tokens that follow each."""

    model: str
    rows: int
    prompt_tokens: int
    new_tokens: int
    samples: bool = False

    @property
    def name(self) -> str:
        how = ", sampled" if self.samples else ""
        return f"{self.model}, {self.rows} × ({self.prompt_tokens} + {self.new_tokens}){how}"


_CACHES = ((1, 1000, 32), (8, 500, 48), (32, 200, 64), (64, 400, 24), (128, 48, 48))
SHAPES = tuple(
    Shape(model=model, rows=rows, prompt_tokens=prompt, new_tokens=new, samples=model == "qwen3" and rows == 64)
    for model in MODELS
    for rows, prompt, new in _CACHES
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Hold one shape."""

    shape: str
    baseline_bytes: int
    measured_bytes: int  # resident
    live_bytes: int  # predicted

    @property
    def error(self) -> float:
        """Return the relative error of baseline + live bytes."""
        return (self.baseline_bytes + self.live_bytes) / self.measured_bytes - 1

    @property
    def error_of_job(self) -> float:
        """Return the relative error without what was resident before."""
        return self.live_bytes / (self.measured_bytes - self.baseline_bytes) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of generation on a CPU, measured against predicted.")
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = write_models(Path(name))
        figures = [figure(folders, shape) for shape in SHAPES if given.only in shape.name]
    show(figures)
    write_report("inference_memory", figures=summary(figures), num_threads=torch.get_num_threads())


def write_models(base: Path) -> dict[str, Path]:
    """Write folders with config.json alone."""
    folders = {name: base / name for name in MODELS}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return folders


def figure(folders: Mapping[str, Path], shape: Shape) -> Figure:
    """Measure one shape in a process of its own, and predict it."""
    settings = {
        "base_model": str(folders[shape.model]),
        "precision": "fp32",
        "trainer": {"type": "none", "batch_size": shape.rows},
        "generation": {"max_new_tokens": shape.new_tokens, "do_sample": shape.samples},
    }
    report = measured_alone(
        Request(
            config=load_config(settings).config.model_copy(update={"initialize": "random"}),
            folder=locate(str(folders[shape.model]), config_only=True),
            batch_size=shape.rows,
            sequence_length=shape.prompt_tokens,
            step_lengths=(),
            num_steps=0,
            phases=("generate",),
            device="cpu",
        ),
        RETURNED_AT_ONCE,
    )
    foretold = predict_memory(
        settings, phase="generate", batch_size=shape.rows, sequence_length=shape.prompt_tokens, device="cpu"
    )
    (measured,) = [peak.total_bytes for peak in report.peaks if peak.phase == "generate"]
    return Figure(
        shape=shape.name,
        baseline_bytes=report.baseline_bytes,
        measured_bytes=measured,
        live_bytes=foretold.allocated_bytes,
    )


def summary(figures: Sequence[Figure]) -> dict[str, Any]:
    """Summarize the errors of all shapes."""
    return {
        "goal": GOAL,
        "shapes": len(figures),
        "error": _spread([each.error for each in figures]),
        "error_of_job": _spread([each.error_of_job for each in figures]),
        "runs": [asdict(each) for each in figures],
    }


def _spread(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"median": median(sizes), "largest": max(sizes)} if sizes else {}


def show(figures: Sequence[Figure]) -> None:
    print_table(
        "peak resident set while generating (MiB)",
        ("shape", "before", "measured", "live", "error", "without what was there before"),
        [
            (
                each.shape,
                _mib(each.baseline_bytes),
                _mib(each.measured_bytes),
                _mib(each.live_bytes),
                f"{each.error:+.2%}",
                f"{each.error_of_job:+.2%}",
            )
            for each in figures
        ],
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


if __name__ == "__main__":
    main()
