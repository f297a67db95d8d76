"""Load a configuration: everything that is wrong with it is told at once, with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from brim.config.completed import completed
from brim.config.findings import to_problems
from brim.config.notes import notes_on
from brim.config.overrides import apply_overrides
from brim.config.places import Path
from brim.config.rules import broken_rules
from brim.config.schema import Config
from brim.config.source import read_source
from brim.config.spelling import modernise
from brim.config.unsupported import screen
from brim.config.validate import validate
from brim.errors import ConfigError, Problem
from brim.notes import as_warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration that is valid as it stands; `auto` values are still to be resolved."""

    config: Config
    notes: tuple[str, ...]  # accepted older spellings, and keys that have no effect
    name: str  # the file as the user typed it, or "configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedConfig:
    """What is wrong with a configuration, and what can be said of it all the same."""

    problems: tuple[Problem, ...]
    config: Config | None  # with defaults in place of what is wrong; None if that does not do
    faulty: tuple[Path, ...]  # the keys that are wrong
    notes: tuple[str, ...]
    name: str


def load_config(source: str | FilePath | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a YAML file or a mapping, set the overrides (`trainer.epochs=1`), check everything.

    Raises ConfigError with all problems in the order of the file, those of overrides last.
    """
    examined = examine_config(source, overrides)
    if examined.problems:
        raise ConfigError(*examined.problems)
    assert examined.config is not None, "without problems there is a configuration"
    return LoadedConfig(config=examined.config, notes=examined.notes, name=examined.name)


def examine_config(source: str | FilePath | Mapping[str, Any], overrides: Sequence[str] = ()) -> ExaminedConfig:
    """The same, with the problems as values. Raises ConfigError for what cannot be read at all."""
    document, problems = apply_overrides(read_source(source), overrides)
    document, spelling_notes = modernise(document)
    screened = screen(document.data)
    validated = validate(screened.data, screened.findings)
    findings = [*screened.findings, *validated.findings]
    config = None if validated.config is None else completed(validated.config)
    if config is not None:
        findings += broken_rules(config, findings)
    problems = [*to_problems(findings, document), *problems]
    notes: tuple[str, ...] = ()
    if not problems and config is not None:
        notes = (*spelling_notes, *as_warnings(notes_on(config, document), topic="configuration"))
    return ExaminedConfig(
        problems=tuple(problems),
        config=config,
        faulty=tuple(path for finding in findings for path in finding.paths),
        notes=notes,
        name=document.name,
    )
