"""Measure how far a merged model is from the unmerged one, merged right and with a mistake; the limit lies between.

    python -m benchmarks.merge_divergence

The base of examples/stdlib_code is fine-tuned for a few steps on a base of 16, 4 and 8 bits, and merged in each dtype;
once right, once with the update forgotten, and with a scale that is wrong. Nothing here is a matter of speed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import brim
from benchmarks.report import print_table, write_report
from brim.infer.metrics import Divergence
from brim.models import merge_adapter
from brim.workflows.export import merge as merging

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "stdlib_code"
BASES: Mapping[str, Mapping[str, Any] | None] = {"16 bits": None, "4 bits": {"bits": 4}, "8 bits": {"bits": 8}}
SCALES = {"right": 1.0, "update forgotten": 0.0, "scale halved": 0.5, "scale doubled": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Hold one merge."""

    base: str
    precision: str
    dtype: str
    merge: str
    num_tokens: int
    mean_kl: float
    same_top: float
    max_logit_difference: float
    adapter_kl: float  # of the base without the adapter from the unmerged model
    limit: float  # the default


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    figures, losses = [], {}
    with tempfile.TemporaryDirectory() as folder:
        data = _data(Path(folder))
        for base, quantization in BASES.items():
            for precision in arguments.precision:
                run = Path(folder) / f"{base} {precision}".replace(" ", "-")
                settings = _settings(data, quantization, precision, arguments.steps)
                result = brim.Model(settings).train(output_directory=run)
                losses[f"{base}, {precision}"] = result.metrics["validation"]["loss"]
                figures += _merged(run, base, precision)
    columns = ["base, precision, dtype, merge", "tokens", "KL, nats a token", "limit", "same top", "largest difference"]
    print_table("merged against unmerged", columns, [_row(figure) for figure in figures])
    print({name: round(loss, 4) for name, loss in losses.items()})
    write_report(
        "merge_divergence",
        figures={
            "steps": arguments.steps,
            "validation_loss": losses,
            "merges": [asdict(figure) for figure in figures],
        },
        num_threads=1,
    )


def _merged(run: Path, base: str, precision: str) -> list[Figure]:
    cases = [(dtype, "right") for dtype in merging.DTYPES] + [("bf16", name) for name in SCALES if name != "right"]
    return [_one(run, base, precision, dtype, name) for dtype, name in cases]


def _one(run: Path, base: str, precision: str, dtype: str, name: str) -> Figure:
    def scaled(model: Any, **options: Any) -> Any:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {adapter: scale * SCALES[name] for adapter, scale in module.scaling.items()}
        return merge_adapter(model, **options)

    with tempfile.TemporaryDirectory() as out, patch.object(merging, "merge_adapter", scaled):
        result = brim.Model.load(run).export(Path(out) / "merged", merge=True, dtype=dtype, max_divergence=math.inf)
        adapter_kl = json.loads((Path(out) / "merged" / "export.json").read_text())["divergence"]["adapter_kl"]
    assert result.divergence is not None
    found = asdict(result.divergence)
    limit = Divergence.limit_of(adapter_kl)
    return Figure(base=base, precision=precision, dtype=dtype, merge=name, **found, adapter_kl=adapter_kl, limit=limit)


def _settings(data: Path, quantization: Mapping[str, Any] | None, precision: str, steps: int) -> dict[str, Any]:
    from ruamel.yaml import YAML

    settings = dict(YAML(typ="safe").load(EXAMPLE / "config.yaml"))
    settings["trainer"] = {**settings["trainer"], "train_steps": steps, "effective_batch_size": 8}
    settings["preprocessing"] = {**settings["preprocessing"], "sample_size": None}
    return {
        **settings,
        "base_model": str(EXAMPLE / "base-model"),
        "dataset": str(data),
        "quantization": quantization,
        "precision": precision,
    }


def _data(folder: Path) -> Path:
    """Return the first rows of each split of the demo's data."""
    from stdlib_code.dataset import instruction_rows, stdlib_modules, write_jsonl

    rows = list(instruction_rows(stdlib_modules()))
    chosen = [
        row for split, most in ((0, 400), (1, 40), (2, 4)) for row in [r for r in rows if r.split == split][:most]
    ]
    write_jsonl(chosen, folder / "data.jsonl")
    return folder / "data.jsonl"


def _row(figure: Figure) -> list[str]:
    name = f"{figure.base}, {figure.precision}, {figure.dtype}, {figure.merge}"
    kl, limit = f"{figure.mean_kl:.1e}", f"{figure.limit:.1e}"
    return [name, f"{figure.num_tokens:,}", kl, limit, f"{figure.same_top:.2%}", f"{figure.max_logit_difference:.3f}"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16-true"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
