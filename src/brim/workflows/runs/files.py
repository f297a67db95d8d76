"""Read and write what a run keeps: JSON, notes, the model card, how it generates, and the template of its chats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brim
from brim.config import Choice, load_config
from brim.config.prompts import prompt_template
from brim.config.schema import Config
from brim.config.text import dump, mask_text
from brim.data.chat import TEMPLATE_FILE, TemplateTexts, chat_template, read_template
from brim.infer.engines import generation_settings
from brim.notes import Note, Say, is_told
from brim.session import Session, with_choices
from brim.storage import writing
from brim.train import RunFolder
from brim.train.checkpoints import TrainState
from brim.units import format_count

if TYPE_CHECKING:
    from transformers import GenerationConfig


def with_trained_weights(config: Config, run: RunFolder) -> Config:
    """Return a run's configuration with its trained weights in place of those that it started from.

    One without an adapter, of a run that trained one, asks for the base model: it is returned as it is.
    """
    weights = str(run.model.resolve())
    if not (run.model / "adapter_config.json").is_file():
        return config.model_copy(update={"base_model": weights, "initialize": "pretrained"})
    return config if config.adapter is None else config.having("adapter.pretrained_adapter_weights", weights)


class RunNotes:
    """Pass notes on, and keep each of them in the run's folder, whether it is shown or not."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said: list[str] = []
        self._path: Path | None = None

    def __call__(self, line: str) -> None:
        self._say(line)
        if is_told(line):
            self._said.append(line)
            self._append()

    def keep_in(self, run: RunFolder, *, step: int) -> None:
        """Write the notes so far, and from now on each one; those of an earlier start stay above."""
        begins = f"after step {step:,}" if step else "from the start"
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._said.insert(0, f"# brim {brim.__version__}, {now}, {begins}")
        self._path = run.notes
        self._append()
        self._say(Note(str(run.notes), kind="rest"))

    def _append(self) -> None:
        if self._path is None:
            return
        with writing(self._path.name, self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{mask_text(line)}\n" for line in self._said)
        self._said = []


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return values by their dotted keys, those in lists of mappings (features, phases) by their numbers."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            value = {str(number): each for number, each in enumerate(value)}
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; an empty one where there is none, or the file is damaged."""
    try:
        return _object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a log, one a line. A line that a kill cut off, or that is not an object, is passed over."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [record for record in map(_object, lines) if record]


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_SETTINGS = "The settings stand in `config.yaml`, the versions in `environment.json`."


def model_card(
    config: Config,
    base_model: str,
    dataset: str,
    *,
    rows: Mapping[str, int],
    metrics: Mapping[str, Mapping[str, float]],
    state: TrainState,
) -> str:
    """Return the card: Markdown with the Hub's front matter, without paths: a local base model is named by its folder.

    rows: of each split. metrics: of the exported weights, by split.
    """
    name = Path(base_model).name if Path(base_model).is_absolute() else base_model
    prompt = "conversations, written out by the tokenizer's chat template"
    if config.chat is None:
        prompt = str(prompt_template(config) or f"{{{config.input_features[0].name}}}")
    fence = _fence(prompt)
    return "\n".join(
        [
            *_head(config, base_model, name, kind="Fully trained model"),
            f"Trained with brim {brim.__version__} on `{dataset}`: "
            f"{format_count(state.step, 'step')}, {format_count(state.consumed_samples, 'sample')}, "
            f"{format_count(state.num_supervised_tokens, 'supervised token')}.",
            f"The weights are those of step {state.best_step if state.best_step is not None else state.step:,}.",
            "",
            "## Figures",
            "",
            *_metrics_table(rows, metrics),
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
    """Return the card for a folder outside the run, with the settings and versions that were in files beside it.

    card: the run's own, which its owner may have edited; None where there is none. packages: versions by name.
    merge: describes how an adapter was merged into the weights.
    """
    base = config.base_model
    text = "\n".join(_head(config, base, local_name(base), kind="Model")) if card is None else card
    if merge is not None:
        text = text.replace("library_name: peft\n", "library_name: transformers\n", 1)
        text = text.replace("\n# LoRA adapter on ", "\n# LoRA adapter merged into ", 1)
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version != "not installed")
    settings = dump(_with_names_for_paths(config))
    fence = _fence(settings)
    lines = [text.replace(f"{_SETTINGS}\n", "").rstrip(), ""]
    if merge is not None:
        lines += ["## Merge", "", merge, ""]
    lines += ["## Settings", "", "Paths are shortened to names.", "", f"{fence}yaml", settings.rstrip(), fence, ""]
    if versions:
        lines += [f"Versions: {versions}.", ""]
    return "\n".join(lines)


def local_name(name: str) -> str:
    """Return the last part of a path of this machine; a Hub id, and what is not a path, as it is."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() else name


def _with_names_for_paths(config: Config) -> Config:
    """Return the configuration with names in place of the paths that its keys hold."""
    chat, retrieval, files = config.chat, config.prompt.retrieval, config.dataset
    paths = {
        "base_model": config.base_model,
        "adapter.pretrained_adapter_weights": config.trained_adapter,
        "chat.template": None if chat is None else chat.template,
        "prompt.retrieval.model_name": None if retrieval is None else retrieval.model_name,
    }
    for key, path in paths.items():
        config = config if path is None else config.having(key, local_name(path))
    if files is None:
        return config
    names = tuple(map(local_name, (files,) if isinstance(files, str) else files))
    return config.having("dataset", names[0] if len(names) == 1 else names)


def _fence(text: str) -> str:
    """Return the fence around a text that may hold fences itself: one backtick more than the longest of them."""
    return "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])


def _head(config: Config, base_model: str, name: str, *, kind: str) -> list[str]:
    """Return the Hub's front matter and the title. name: what the base model is called; on the Hub, that is its id."""
    library, kind = ("transformers", kind) if config.adapter is None else ("peft", "LoRA adapter")
    hub = [f"base_model: {base_model}"] if name == base_model else []
    front = [f"library_name: {library}", *hub, "pipeline_tag: text-generation", "tags: [brim]"]
    return ["---", *front, "---", "", f"# {kind} on {name}", ""]


def _learned(config: Config) -> str:
    if config.chat is None:
        return "the tokens of the answer and its end"
    turns = "each of the assistant's turns" if config.chat.supervise == "all" else "the assistant's last turn"
    return f"the tokens of {turns} and its end"


def _metrics_table(rows: Mapping[str, int], found: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = ["| split | rows | loss | perplexity | token accuracy |", "| --- | ---: | ---: | ---: | ---: |"]
    for split, num_rows in rows.items():
        metrics = found.get(split)
        figures = (
            f"{metrics['loss']:.4f} | {metrics['perplexity']:.3f} | {metrics['token_accuracy']:.4f}"
            if metrics
            else "– | – | –"
        )
        lines.append(f"| {split} | {num_rows:,} | {figures} |")
    return lines


def template_texts(session: Session) -> TemplateTexts | None:
    """Return the template's source, to be stored with the trained weights; None without `chat`."""
    chat = session.config.chat
    return None if chat is None else read_template(chat.template, session.encoder.folder)


def with_stored_template(config: Config, run: RunFolder) -> Config:
    """Return a run's configuration with the template that is stored in it: the base's own may have changed since."""
    if config.chat is None or not (run.model / TEMPLATE_FILE).is_file():
        return config
    return config.having("chat.template", str(run.model.resolve()))


def with_day_of_run(session: Session, run: RunFolder) -> Session:
    """Return the session with the day that a run was begun on, so that it can be continued on another."""

    def day() -> str | None:
        chat = load_config(run.config).config.chat if run.config.is_file() else None
        return None if chat is None else chat.date

    return with_day(session, day, reason="the day on which the run began")


def with_day(session: Session, day: Callable[[], str | None], *, reason: str) -> Session:
    """Return the session with another day, where its chat template asks for one. day: None: it is not known."""
    was_chosen = any(choice.key == "chat.date" for choice in session.choices)
    found = day() if was_chosen else None
    return session if found is None else with_choices(session, [Choice(key="chat.date", value=found, reason=reason)])


def settings_of(session: Session, own: GenerationConfig) -> dict[str, Any]:
    """Return how the model generates, for transformers' GenerationConfig. own: the model's own settings.

    A text ends with the template's tokens, with that which training put there, or where the model was made to stop.
    """
    encoder, chat, stops = session.encoder, session.config.chat, own.eos_token_id
    ends = [] if chat is None else [*chat_template(chat, encoder).end_ids(encoder)]
    ends += [encoder.eos_id, *(stops if isinstance(stops, list) else [] if stops is None else [stops])]
    return generation_settings(session.config.generation, pad_id=encoder.pad_id, end_ids=list(dict.fromkeys(ends)))
