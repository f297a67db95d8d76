"""The model card of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from brim.config import Config, dump
from brim.config.prompt_parts import template_with_task
from brim.train.state import TrainState
from brim.units import format_count

_SETTINGS = "The settings stand in `config.yaml`, the versions in `environment.json`."


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
    prompt = template_with_task(config)
    if config.chat is not None:
        prompt = "conversations, written out by the tokenizer's chat template"
    elif prompt is None:
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
            f"Trained with brim {facts.version} on `{facts.dataset}`: "
            f"{format_count(facts.state.step, 'step')}, {format_count(facts.state.consumed_samples, 'sample')}, "
            f"{format_count(facts.state.num_supervised_tokens, 'supervised token')}.",
            "The weights are those of step "
            f"{facts.state.best_step if facts.state.best_step is not None else facts.state.step:,}.",
            "",
            "## Figures",
            "",
            *_metrics_table(facts),
            "",
            f"Loss is the mean cross-entropy in nats over {_learned(config)}.",
            "",
            "## Prompt",
            "",
            f"{fence}text",
            prompt,
            fence,
            "",
            _SETTINGS,
            "",
        ]
    )


def card_apart(card: str | None, config: Config, *, packages: Mapping[str, str], merge: str | None = None) -> str:
    """A card for a folder that leaves the run: the settings and versions that stood beside it stand in it.

    card: the run's own, with what its owner may have changed; None where there is none. packages: versions by name.
    merge: what is to be said of an adapter that is part of the weights now.
    """
    text = card if card is not None else _card_without_run(config)
    if merge is not None:
        text = text.replace("library_name: peft\n", "library_name: transformers\n", 1)
        text = text.replace("\n# LoRA adapter on ", "\n# LoRA adapter merged into ", 1)
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version != "not installed")
    settings = dump(config.model_copy(update=_names_for_paths(config)))
    fence = _fence(settings)
    lines = [text.replace(f"{_SETTINGS}\n", "").rstrip(), ""]
    if merge is not None:
        lines += ["## Merge", "", merge, ""]
    lines += ["## Settings", "", "Paths are shortened to names.", "", f"{fence}yaml", settings.rstrip(), fence, ""]
    if versions:
        lines += [f"Versions: {versions}.", ""]
    return "\n".join(lines)


def local_name(name: str) -> str:
    """A path of this machine by its last part; a Hub id, and what is no path, as it is."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() else name


def _card_without_run(config: Config) -> str:
    kind = "LoRA adapter" if config.adapter is not None else "Model"
    library = "peft" if config.adapter is not None else "transformers"
    hub = [] if local_name(config.base_model) != config.base_model else [f"base_model: {config.base_model}"]
    front = [f"library_name: {library}", *hub, "pipeline_tag: text-generation", "tags: [brim]"]
    return "\n".join(["---", *front, "---", "", f"# {kind} on {local_name(config.base_model)}", ""])


def _names_for_paths(config: Config) -> dict[str, object]:
    """What tells nothing of the machine in place of the keys that hold paths."""
    update: dict[str, object] = {"base_model": local_name(config.base_model)}
    if config.dataset is not None:
        files = (config.dataset,) if isinstance(config.dataset, str) else config.dataset
        names = tuple(map(local_name, files))
        update["dataset"] = names[0] if len(names) == 1 else names
    if config.adapter is not None and config.adapter.pretrained_adapter_weights is not None:
        name = local_name(config.adapter.pretrained_adapter_weights)
        update["adapter"] = config.adapter.model_copy(update={"pretrained_adapter_weights": name})
    if config.chat is not None and config.chat.template is not None:
        update["chat"] = config.chat.model_copy(update={"template": local_name(config.chat.template)})
    retrieval = config.prompt.retrieval
    if retrieval is not None and retrieval.model_name is not None:
        named = retrieval.model_copy(update={"model_name": local_name(retrieval.model_name)})
        update["prompt"] = config.prompt.model_copy(update={"retrieval": named})
    return update


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


def _learned(config: Config) -> str:
    if config.chat is None:
        return "the tokens of the answer and its end"
    turns = "each of the assistant's turns" if config.chat.supervise == "all" else "the assistant's last turn"
    return f"the tokens of {turns} and its end"


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
