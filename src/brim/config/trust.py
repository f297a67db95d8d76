"""Trust is not inherited: a run's folder that somebody made does not decide that code is run here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError, Problem

_REMOTE_CODE = "trust_remote_code"
_FUNCTION = "trainer.batch_increase_function"


def require_trust_said_again(config: Config, overrides: Sequence[str], where: Path, *, begins: bool = False) -> None:
    """Raise ConfigError where a run's configuration, and no override, asks to run code.

    where: its config.yaml. begins: a run is planned or begun from it, which calls its batch_increase_function; a run
    that goes on has the sizes in its checkpoint.
    """
    said = {override.partition("=")[0].strip() for override in overrides}
    problems = []
    if config.trust_remote_code and _REMOTE_CODE not in said:
        problems.append(
            Problem(
                what=f"{_REMOTE_CODE} is true in the configuration of a run, which does not decide that for this "
                "machine",
                where=str(where),
                expected="your own word for it",
                fix=f"if you trust the base model's code, add {_REMOTE_CODE}=true to the command; otherwise "
                f"{_REMOTE_CODE}=false",
            )
        )
    function = config.trainer.batch_increase_function if isinstance(config.trainer, FinetuneTrainer) else None
    if begins and isinstance(function, str) and _FUNCTION not in said:
        problems.append(
            Problem(
                what=f"{_FUNCTION} names code in the configuration of a run, which does not decide that for this "
                "machine",
                where=str(where),
                expected="your own word for it",
                fix=f"if you trust {function}, add {_FUNCTION}={function} to the command; otherwise {_FUNCTION}=null",
            )
        )
    if problems:
        raise ConfigError(*problems)
