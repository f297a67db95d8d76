"""Measure what measuring the gradient's noise costs, and how right the measurements are.

    python -m benchmarks.noise_scale

The example's model (examples/stdlib_code, 4 million weights, an adapter on all linear layers) after a few steps of
training, on docstrings and their code. How right: the gradient of each row of a pool is computed by itself, so that
|G|² and tr Σ over the pool are known; batches are drawn from it, and each way to group their rows says what it finds.
What it costs: steps alternate within one process: cut by length, cut in order, and measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.noise_accuracy import BATCH_ROWS, WAYS, Accuracy, Pool, accuracy
from benchmarks.report import print_table, write_report
from benchmarks.subject import SEED, configuration, lora, make_rows
from brim.batching import NUM_GROUPS, ByRows, GradientStep
from brim.config import load_config
from brim.data import prepare
from brim.data.read import read
from brim.data.tokens import TokenRow, collate
from brim.models import LLM, load_llm
from brim.models.loss import NextToken
from brim.session import open_session
from brim.train.gradient import GradientNorms

_BASE = Path(__file__).parents[1] / "examples" / "stdlib_code" / "base-model"
_SMALLER_BATCHES = (32, 16, 8)
_COST_ROWS = 32
_MOST_CHARACTERS = 800  # of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Hold steps over those that are cut by length and not measured; medians."""

    trained: str
    plain_ms: float
    in_order: float
    measured: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=192, help="rows")
    parser.add_argument("--draws", type=int, default=3000, help="batches drawn from the pool")
    parser.add_argument("--steps", type=int, default=3, help="of each kind, for their cost")
    parser.add_argument("--training-steps", type=int, default=10, help="before anything is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows_file = make_rows(Path(folder) / "rows.jsonl", num_rows=options.pool, max_characters=_MOST_CHARACTERS)
        llm, rows = _subject(rows_file, adapter=True)
        _train(llm.model, rows, num_steps=options.training_steps)
        pool = _pool(llm.model, rows)
        accuracies = [accuracy(way, pool, BATCH_ROWS, options.draws) for way in WAYS]
        accuracies += [accuracy(WAYS[0], pool, batch_rows, options.draws) for batch_rows in _SMALLER_BATCHES]
        costs = []
        for trained in ("adapter", "all weights"):
            llm, rows = _subject(rows_file, adapter=trained == "adapter")
            costs.append(_cost(trained, llm.model, rows, options.steps))
    truth = {"squared_gradient": pool.squared_gradient, "gradient_variance": pool.gradient_variance}
    _show(pool, accuracies, costs)
    figures = {
        "cost_batch_rows": _COST_ROWS,
        "pool": {
            "num_rows": len(pool.lengths),
            "tokens_quartiles": np.percentile(pool.lengths, [25, 50, 75]).tolist(),
            "supervised_variation": float(pool.weights.std() / pool.weights.mean()),
            **truth,
            "effective_dimensions": pool.effective_dimensions,
            "noise_scale": pool.gradient_variance / pool.squared_gradient,
        },
        "accuracy": [asdict(each) for each in accuracies],
        "cost": [asdict(each) for each in costs],
    }
    write_report("noise_scale", figures=figures, num_threads=1)


def _subject(rows_file: Path, *, adapter: bool) -> tuple[LLM, list[TokenRow]]:
    settings = configuration(_BASE, adapter=lora() if adapter else None, trainer={})
    session = open_session(load_config(settings).config)
    prepared = prepare(read(rows_file), session.config, session.encoder, context_length=session.folder.context_length)
    llm = load_llm(session.config, session.folder, session.device, trainable=True)
    llm.model.train()
    return llm, list(prepared.splits["train"])


def _train(model: nn.Module, rows: Sequence[TokenRow], *, num_steps: int) -> None:
    """A fresh adapter's gradient is zero in one half of its weights."""
    optimizer = torch.optim.Adam(_trained(model), lr=1e-3)
    for step in range(num_steps):
        batch = [rows[(8 * step + number) % len(rows)] for number in range(8)]
        loss = _loss(model, batch) / sum(int(row.supervised.sum()) for row in batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _pool(model: nn.Module, rows: Sequence[TokenRow]) -> Pool:
    parameters = _trained(model)
    gradients = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(_loss(model, [row]), parameters)]) for row in rows]
    )
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in torch.split(gradients, 1 << 15, dim=1):  # fp64 of all at once would be as large again, and twice
        products += part.double() @ part.double().T
    return Pool(
        lengths=np.array([len(row.input_ids) for row in rows]),
        weights=np.array([int(row.supervised.sum()) for row in rows]),
        products=products.numpy(),
    )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _loss(model: nn.Module, rows: Sequence[TokenRow]) -> torch.Tensor:
    return NextToken().loss(model, collate(list(rows), pad_id=1))


def _cost(trained: str, model: nn.Module, rows: Sequence[TokenRow], num_steps: int) -> Cost:
    batch = [rows[int(number)] for number in np.random.default_rng(SEED).permutation(len(rows))[:_COST_ROWS]]
    lengths = np.array([len(row.input_ids) for row in batch])
    parameters = _trained(model)

    def backward(positions: NDArray[np.intp]) -> torch.Tensor:
        loss = _loss(model, [batch[int(position)] for position in positions]) / len(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    step = GradientStep(
        cutter=ByRows(max_rows=_COST_ROWS // NUM_GROUPS),
        parameters=parameters,
        backward=backward,
        on_event=lambda event: None,
    )

    def measured() -> None:
        with GradientNorms(parameters) as norms:
            step.run(lengths, num_groups=NUM_GROUPS, meter=norms)
        norms.squared()

    kinds: dict[str, Callable[[], object]] = {
        "plain": lambda: step.run(lengths),
        "in order": lambda: step.run(lengths, num_groups=NUM_GROUPS),
        "measured": measured,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_steps + 1):
        for kind, run in kinds.items():
            started = time.process_time()
            run()
            seconds[kind].append(time.process_time() - started)
    # The first of each does not count; the steps of a round saw the same machine.
    ratio = {
        kind: median(mine / plain for mine, plain in zip(each[1:], seconds["plain"][1:], strict=True))
        for kind, each in seconds.items()
    }
    return Cost(
        trained=trained,
        plain_ms=round(1000 * median(seconds["plain"][1:]), 1),
        in_order=round(ratio["in order"], 3),
        measured=round(ratio["measured"], 3),
    )


def _show(pool: Pool, accuracies: Sequence[Accuracy], costs: Sequence[Cost]) -> None:
    print_table(
        f"measured over true (noise scale {pool.gradient_variance / pool.squared_gradient:.0f} rows,"
        f" {pool.effective_dimensions:.0f} effective dimensions)",
        ("groups", "batch", "|G|²", "tr Σ", "noise scale", "averaged: 5%", "50%", "95%", "within ×2", "one alone"),
        [
            (
                each.way,
                str(each.batch_rows),
                f"{each.squared_gradient:.3f}",
                f"{each.gradient_variance:.3f}",
                f"{each.noise_scale:.3f}",
                *(f"{quantile:.2f}" for quantile in each.smoothed_quantiles),
                f"{each.within_factor_of_two:.1%}",
                f"{each.single_within_factor_of_two:.1%}",
            )
            for each in accuracies
        ],
    )
    print_table(
        "processor time over a step that is cut by length",
        ("trained", "plain, ms", "in order", "measured"),
        [(each.trained, f"{each.plain_ms:.0f}", f"{each.in_order:.3f}", f"{each.measured:.3f}") for each in costs],
    )


if __name__ == "__main__":
    main()
