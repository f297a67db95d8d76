"""Measure what it costs to draw an adapter's dropout by row.

    python -m benchmarks.dropout_by_row

Forward and backward pass of the example's model (examples/stdlib_code, adapter on all linear layers) on micro-batches
of random tokens, without dropout, with PyTorch's, and with masks by row. The three alternate within one process; times
are the processor's, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import print_table
from brim.models.adapter_function import use_adapter_function
from brim.models.dropout import RowDropout, drop_by_row

_BASE = Path(__file__).parents[1] / "examples" / "stdlib_code" / "base-model"
_TOKENS = 139  # the median of the example's rows
_SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Hold a model, and what tells it of its rows."""

    model: nn.Module
    dropout: RowDropout | None = None

    def telling(self, lengths: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext() if self.dropout is None else self.dropout.of_rows(range(len(lengths)), lengths, step=0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--repetitions", type=int, default=9)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    by_row = _model(given.rate)
    contenders = {
        "without": Contender(model=_model(0.0)),
        "PyTorch's": Contender(model=_model(given.rate)),
        "by row": Contender(model=by_row, dropout=drop_by_row(by_row, seed=_SEED)),
    }
    lines = []
    for num_rows in given.rows:
        seconds = _measure(contenders, num_rows, given.repetitions)
        ratios = [f"{seconds[name] / seconds['without']:.3f}" for name in ("PyTorch's", "by row")]
        lines.append([str(num_rows), f"{1000 * seconds['without']:.0f}", *ratios])
    print_table(
        f"{_TOKENS} tokens a row, rate {given.rate}",
        ["rows", "without, ms", "PyTorch's, ×", "by row, ×"],
        lines,
    )


def _model(rate: float) -> nn.Module:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(_SEED)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(_BASE), dtype=torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=rate, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(base, lora)
    use_adapter_function(adapted)
    return adapted.train()


def _measure(contenders: dict[str, Contender], num_rows: int, repetitions: int) -> dict[str, float]:
    """Median processor seconds of each; the first round does not count."""
    tokens = torch.randint(2, 2000, (num_rows, _TOKENS), generator=torch.Generator().manual_seed(_SEED))
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions + 1):
        for name, contender in contenders.items():
            spent[name].append(_seconds(lambda each=contender: _run(each, tokens)))  # type: ignore[misc]
    return {name: median(each[1:]) for name, each in spent.items()}


def _run(contender: Contender, tokens: Tensor) -> None:
    model: Any = contender.model
    with contender.telling([tokens.shape[1]] * len(tokens)):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def _seconds(run: Callable[[], None]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


if __name__ == "__main__":
    main()
