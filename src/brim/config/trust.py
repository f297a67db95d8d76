"""Trust is not inherited: a run's folder that somebody made does not decide that its base model's code is run here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from brim.config.schema import Config
from brim.errors import ConfigError, Problem

_KEY = "trust_remote_code"


def require_trust_said_again(config: Config, overrides: Sequence[str], where: Path) -> None:
    """Raise ConfigError where a run's configuration, and no override, asks to run code. where: its config.yaml."""
    said = any(override.partition("=")[0].strip() == _KEY for override in overrides)
    if config.trust_remote_code and not said:
        raise ConfigError(
            Problem(
                what=f"{_KEY} is true in the configuration of a run, which does not decide that for this machine",
                where=str(where),
                expected="your own word for it",
                fix=f"if you trust the base model's code, add {_KEY}=true to the command; otherwise {_KEY}=false",
            )
        )
