"""A verb's first argument: a configuration, a run's folder or a model's; and all that is wrong with it and its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.options import config_file, is_run, require_exists
from brim.errors import ConfigError, DataError, InputError, Problem

if TYPE_CHECKING:
    from brim.api.model import Model
    from brim.config import Config, LoadedConfig
    from brim.config.places import Path as KeyPath


def open_model(
    config_or_run: Path,
    overrides: Sequence[str],
    dataset: str | Sequence[str] | None = None,
    *,
    with_answers: bool = True,
) -> Model:
    """The model of a configuration file, a run or a base model. dataset, with_answers: see `open_config`."""
    require_exists(config_or_run)
    if is_run(config_or_run):
        from brim.api.model import Model

        return Model.load(config_or_run, overrides=overrides)
    open_config(config_or_run, overrides, dataset, with_answers=with_answers)
    from brim.api.model import Model

    return Model(config_or_run, overrides=overrides)


def open_config(
    config_or_run: Path, overrides: Sequence[str], dataset: str | Sequence[str] | None, *, with_answers: bool = True
) -> LoadedConfig:
    """The configuration of a file, or of a run.

    with_answers: whether the verb reads the data's answers, too.
    Raises ConfigError; or InputError, where something is wrong with the data as well, as far as that can be known.
    """
    from brim.config import LoadedConfig, examine_config

    examined = examine_config(config_file(config_or_run), overrides)
    if not examined.problems:
        assert examined.config is not None, "without problems there is a configuration"
        return LoadedConfig(config=examined.config, notes=examined.notes, name=examined.name)
    others = []
    if examined.config is not None:
        own = None if ("dataset",) in examined.faulty else examined.config.dataset
        data = own if dataset is None else dataset
        others = problems_with_data(examined.config, data, with_answers=with_answers, faulty=examined.faulty)
    raise (InputError if others else ConfigError)(*examined.problems, *others)


def problems_with_data(
    config: Config, dataset: str | Sequence[str] | None, *, with_answers: bool = True, faulty: Sequence[KeyPath] = ()
) -> list[Problem]:
    """What is wrong with the data, where something else keeps a verb from using it.

    faulty: keys of the configuration that are wrong, in whose place it has defaults.
    """
    if dataset is None:
        return []
    from brim.data import data_problems, read

    trains = config.trainer.type != "none" or ("trainer", "type") in faulty
    try:
        source = read(dataset)
    except DataError as error:
        return list(error.problems)
    return data_problems(
        config,
        source,
        with_answers=with_answers and trains,  # the base model as it is can be given prompts alone
        only=None if trains else "full",
        faulty=faulty,
    )
