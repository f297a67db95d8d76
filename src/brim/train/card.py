"""The model card of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from brim.config import Config
from brim.train.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the card tells beside the configuration."""

    base_model: str
    dataset: str
    rows: Mapping[str, int]  # by split
    metrics: Mapping[str, Mapping[str, float]]  # by split, of the exported weights
    state: TrainState
    version: str


def model_card(config: Config, facts: CardFacts) -> str:
    """Markdown with the Hub's front matter. No paths of the machine: a local base model is named by its folder."""
    kind = "LoRA adapter" if config.adapter is not None else "Fully trained model"
    prompt = config.prompt.template
    if prompt is None:
        prompt = f"{{{config.input_features[0].name}}}"
    fence = _fence(prompt)
    return "\n".join(
        [
            "---",
            *_front_matter(config, facts),
            "---",
            "",
            f"# {kind} on {_base_name(facts.base_model)}",
            "",
            f"Trained with brim {facts.version} on `{facts.dataset}`: {facts.state.step:,} steps, "
            f"{facts.state.consumed_samples:,} samples, {facts.state.num_supervised_tokens:,} supervised tokens.",
            "The weights are those of step "
            f"{facts.state.best_step if facts.state.best_step is not None else facts.state.step:,}.",
            "",
            "## Figures",
            "",
            *_metrics_table(facts),
            "",
            "Loss is the mean cross-entropy in nats over the tokens of the answer and its end.",
            "",
            "## Prompt",
            "",
            f"{fence}text",
            prompt,
            fence,
            "",
            "The settings stand in `config.yaml`, the versions in `environment.json`.",
            "",
        ]
    )


def _fence(text: str) -> str:
    """What encloses a text that may hold fences of its own: one backtick more than the longest of them."""
    return "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])


def _front_matter(config: Config, facts: CardFacts) -> list[str]:
    lines = ["library_name: peft" if config.adapter is not None else "library_name: transformers"]
    if not Path(facts.base_model).is_absolute():
        lines.append(f"base_model: {facts.base_model}")
    return [*lines, "pipeline_tag: text-generation", "tags: [brim]"]


def _base_name(base_model: str) -> str:
    return Path(base_model).name if Path(base_model).is_absolute() else base_model


def _metrics_table(facts: CardFacts) -> list[str]:
    lines = ["| split | rows | loss | perplexity | token accuracy |", "| --- | ---: | ---: | ---: | ---: |"]
    for split, num_rows in facts.rows.items():
        metrics = facts.metrics.get(split)
        figures = (
            f"{metrics['loss']:.4f} | {metrics['perplexity']:.3f} | {metrics['token_accuracy']:.4f}"
            if metrics
            else "– | – | –"
        )
        lines.append(f"| {split} | {num_rows:,} | {figures} |")
    return lines
