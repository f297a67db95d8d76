"""Runs of several configurations as tables: their losses, what they took, and every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from brim.report.page import PageTable
from brim.report.seed_summary import Estimate, Runs, Spread, Summary, verdict
from brim.units import format_bytes, format_seconds

_WHOSE: Mapping[str, str] = {
    "validation": "Final loss on the validation rows",
    "test": "Final loss on the test rows",
    "train": "Loss of the last tenth of the training",
}


def loss_tables(found: Sequence[Summary], *, first: str, splits: Sequence[str]) -> list[PageTable]:
    """A table for each split: the mean over seeds, and the difference to the first configuration."""
    return [_loss_table(found, first=first, split=split) for split in splits]


def cost_table(found: Sequence[Summary]) -> PageTable:
    """Steps, samples, tokens, time and memory; of runs that differ from the least to the most."""
    return PageTable(
        caption="What a run takes; time of the steps alone, largest memory of all seeds",
        heads=("configuration", "steps", "rows", "tokens", "time", "memory"),
        rows=[
            (
                each.name,
                _range(each.num_steps, _count),
                _range(each.num_samples, _count),
                _range(each.num_tokens, _count),
                format_seconds(each.seconds.mean),
                format_bytes(int(each.peak_bytes.most)),
            )
            for each in found
        ],
    )


def run_table(runs: Mapping[str, Runs], *, splits: Sequence[str]) -> PageTable:
    """Every run, by seed."""
    seeds = sorted({seed for found in runs.values() for seed in found})
    return PageTable(
        caption="Every run",
        heads=("seed", "configuration", *(f"{split} loss" for split in splits), "steps", "tokens", "time", "memory"),
        rows=[
            (
                str(seed),
                name,
                *(_loss(found[seed].losses.get(split, math.nan)) for split in splits),
                _count(found[seed].num_steps),
                _count(found[seed].num_tokens),
                format_seconds(found[seed].seconds),
                format_bytes(found[seed].peak_bytes),
            )
            for seed in seeds
            for name, found in runs.items()
            if seed in found
        ],
        num_texts=2,
    )


def markdown(table: PageTable) -> str:
    """The table in GitHub's Markdown, its caption above."""
    rules = ["---" if column < table.num_texts else "---:" for column in range(len(table.heads))]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (table.heads, rules, *table.rows)]
    return "\n".join([f"{table.caption}:", "", *(f"| {line} |" for line in lines)])


def _loss_table(found: Sequence[Summary], *, first: str, split: str) -> PageTable:
    shown = [each for each in found if split in each.losses]
    with_seeds = len({each.seeds for each in shown}) > 1
    seeds_of = ["seeds"] if with_seeds else []
    return PageTable(
        caption=f"{_WHOSE[split]}, and how it differs from that of {first}",
        heads=("configuration", *seeds_of, "loss", "difference", "what the seeds show"),
        rows=[
            (
                each.name,
                *([", ".join(map(str, each.seeds))] if with_seeds else []),
                _cell(each.losses[split]),
                *_difference(each, split),
            )
            for each in shown
        ],
    )


def _difference(summary: Summary, split: str) -> tuple[str, str]:
    difference = summary.differences.get(split)
    return ("", "") if difference is None else (_cell(difference, sign="+"), verdict(difference))


def _cell(estimate: Estimate, *, sign: str = "") -> str:
    text = _loss(estimate.mean, sign=sign)
    interval = estimate.interval
    return text if interval is None else f"{text} ± {(interval.high - interval.low) / 2:.4f}"


def _loss(value: float, *, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else "none"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _range(spread: Spread, text: Callable[[float], str]) -> str:
    return text(spread.mean) if spread.least == spread.most else f"{text(spread.least)}–{text(spread.most)}"
