"""A verb's first argument as a model: a configuration, or a run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.options import require_exists

if TYPE_CHECKING:
    from brim.api.model import Model


def open_model(config_or_run: Path, overrides: Sequence[str]) -> Model:
    """The model of a configuration file, or of a finished run."""
    require_exists(config_or_run)
    from brim.api.model import Model

    if config_or_run.is_dir():
        return Model.load(config_or_run, overrides=overrides)
    return Model(config_or_run, overrides=overrides)
