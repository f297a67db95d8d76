"""Load a configuration: everything that is wrong with it is told at once, with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.config.findings import to_problems
from brim.config.notes import notes_on
from brim.config.overrides import apply_overrides
from brim.config.rules import broken_rules
from brim.config.schema import Config
from brim.config.source import read_source
from brim.config.spelling import modernise
from brim.config.unsupported import screen
from brim.config.validate import validate
from brim.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration that is valid as it stands; `auto` values are still to be resolved."""

    config: Config
    notes: tuple[str, ...]  # accepted older spellings, and keys that have no effect
    name: str  # the file as the user typed it, or "configuration"


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a YAML file or a mapping, set the overrides (`trainer.epochs=1`), check everything.

    Raises ConfigError with all problems in the order of the file, those of overrides last.
    """
    document = apply_overrides(read_source(source), overrides)
    document, spelling_notes = modernise(document)
    screened = screen(document.data)
    validated = validate(screened.data, screened.findings)
    findings = [*screened.findings, *validated.findings]
    if validated.config is not None:
        findings += broken_rules(validated.config, findings)
    if findings:
        raise ConfigError(*to_problems(findings, document))
    assert validated.config is not None, "without findings there is a configuration"
    notes = (*spelling_notes, *notes_on(validated.config, document))
    return LoadedConfig(config=validated.config, notes=notes, name=document.name)
