"""The configurations of a comparison: whether their losses can be compared, and what is set so that they can."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.config import Config, FinetuneTrainer, load_config, require_trust_said_again
from brim.data.read_files import Files, absolute_files
from brim.errors import ConfigError, InputError, Problem
from brim.models.adapter_folder import continued
from brim.models.folder import locate
from brim.models.needs import require_trainable
from brim.models.quantization import with_stored_quantization

WITHOUT_EARLY_STOP = "trainer.early_stop=-1"
_LONGEST_NAME = 60  # characters: it is a folder's name, and a cell of the tables
_LENGTH_KEYS = ("epochs", "train_steps", "train_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A configuration that takes part."""

    name: str  # of its folder and in the tables; no two have the same
    file: Path
    config: Config
    overrides: tuple[str, ...]  # of every run of it, beside the seed and the number of samples
    changes: tuple[str, ...]  # what the comparison sets otherwise, for people

    @property
    def digest(self) -> str:
        """Of all that a run of it depends on, but the seed and the content of the data."""
        settings = self.config.model_dump(mode="json", exclude={"random_seed"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def entrants_of(configs: Sequence[str | Path], overrides: Sequence[str], dataset: Files | None) -> list[Entrant]:
    """The configurations as they will be run, the first being what the others are compared to.

    Raises InputError for fewer than two, ConfigError for what does not train and for other data, splits or answers.
    """
    if len(configs) < 2:
        raise InputError(
            Problem(
                what="there is nothing to compare: " + ("one configuration" if configs else "no configuration"),
                expected="two or more configurations",
                fix="name another one; one alone is trained by `brim train`",
            )
        )
    said = [*overrides, *([] if dataset is None else [f"dataset={json.dumps(absolute_files(dataset))}"])]
    said.append(WITHOUT_EARLY_STOP)
    files = [_config_file(Path(config)) for config in configs]
    loaded = [_loaded(file, said, is_run=Path(config).is_dir()) for config, file in zip(configs, files, strict=True)]
    problems = [each for config, file in zip(loaded, files, strict=True) for each in _untrainable(config, file)]
    problems += [
        each for config, file in zip(loaded[1:], files[1:], strict=True) for each in _differ(loaded[0], config, file)
    ]
    if problems:
        raise ConfigError(*problems)
    names = _names(configs)
    return [
        Entrant(
            name=name,
            file=file,
            config=config,
            overrides=tuple(said),
            changes=tuple(_changes(config, loaded[0], name=name, first_name=names[0])),
        )
        for name, file, config in zip(names, files, loaded, strict=True)
    ]


def _config_file(path: Path) -> Path:
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            Problem(
                what="this folder is not a run: it has no config.yaml" if path.is_dir() else f"no such file: {path}",
                where=str(path) if path.is_dir() else "",
                expected="a YAML configuration, or the folder of a run",
            )
        )
    return file


def _loaded(file: Path, overrides: Sequence[str], *, is_run: bool) -> Config:
    """The configuration, once it is known that its base model is there and can be trained."""
    config = load_config(file, overrides).config
    if is_run:
        require_trust_said_again(config, overrides, file, begins=True)
    folder = locate(config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code)
    if config.adapter is not None and config.adapter.pretrained_adapter_weights is not None:
        continued(config.adapter)
    require_trainable(with_stored_quantization(config, folder), folder)
    return config


def _untrainable(config: Config, file: Path) -> Iterator[Problem]:
    if not isinstance(config.trainer, FinetuneTrainer):
        yield Problem(
            what="this configuration trains nothing",
            where=str(file),
            expected="trainer.type: finetune",
            fix="models that are not trained are compared with `brim evaluate --against`",
        )
    if config.dataset is None:
        yield Problem(what="there is no data set", where=str(file), expected="--dataset FILE, or the key `dataset`")


def _differ(first: Config, other: Config, file: Path) -> Iterator[Problem]:
    """What makes the losses of two configurations those of different tasks."""
    ours, theirs = _task(first), _task(other)
    for key in ours:
        if ours[key] != theirs[key]:
            yield Problem(
                what=f"{key} is {_shown(theirs[key])}, in the first configuration {_shown(ours[key])}: their losses "
                "would be of different rows or answers",
                where=str(file),
                fix="set the same for all; an override such as "
                + ("--dataset FILE does" if key == "dataset" else f"{key}=… does"),
            )


def _task(config: Config) -> dict[str, Any]:
    """What has to be the same: which rows there are, how they are split, and what is learned of each."""
    rows = config.preprocessing
    return {
        "dataset": None if config.dataset is None else absolute_files(config.dataset),
        "preprocessing.split": rows.split.model_dump(mode="json"),
        "preprocessing.sample_ratio": rows.sample_ratio,
        "preprocessing.sample_size": rows.sample_size,
        **_answer(config),
    }


def _answer(config: Config) -> dict[str, Any]:
    if config.chat is not None:
        return {"chat": True, "output_features": None}
    feature = config.output_features[0]
    return {"chat": False, "output_features": [feature.column_name, feature.type]}


def _changes(config: Config, first: Config, *, name: str, first_name: str) -> Iterator[str]:
    trainer, other = config.trainer, first.trainer
    assert isinstance(trainer, FinetuneTrainer)
    assert isinstance(other, FinetuneTrainer)
    ours, theirs = ({key: getattr(each, key) for key in _LENGTH_KEYS} for each in (trainer, other))
    if config is not first and (ours != theirs or trainer.train_steps is not None):
        key = next((key for key in reversed(_LENGTH_KEYS) if ours[key] is not None), "epochs")
        yield f"{name} is trained on as many rows as {first_name}, whatever its trainer.{key} ({ours[key]:,}) says"
    if config.random_seed != first.random_seed:
        yield f"{name} takes the seeds of {first_name}, not its own random_seed ({config.random_seed})"


def _names(configs: Sequence[str | Path]) -> list[str]:
    """The files' names without their endings, numbered where they are the same."""
    names: list[str] = []
    for config in configs:
        path = Path(os.path.abspath(config))  # noqa: PTH100 (a folder may be named `.`)
        stem = (path.name if path.is_dir() else path.stem)[:_LONGEST_NAME]
        number, name = 1, stem
        while name.lower() in (*(each.lower() for each in names), "compare.json", "compare.html", "curves.png"):
            number += 1
            name = f"{stem}-{number}"
        names.append(name)
    return names


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
