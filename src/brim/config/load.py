"""Load a configuration: everything that is wrong with it is told at once, with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from brim.config.completed import completed
from brim.config.findings import Finding, to_problems
from brim.config.notes import notes_on
from brim.config.overrides import apply_overrides
from brim.config.places import Document, Path, dotted, value_at
from brim.config.rules import broken_rules
from brim.config.schema import Config
from brim.config.source import read_source
from brim.config.spelling import modernise
from brim.config.unsupported import screen
from brim.config.validate import validate
from brim.config.wording import line
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
    config, findings = _examined(document)
    idle = [finding for finding in findings if finding.is_idle]
    findings = [finding for finding in findings if not finding.is_idle]
    problems = [*to_problems(findings, document), *problems]
    notes: tuple[str, ...] = ()
    if not problems and config is not None:
        told = [*notes_on(config, document), *_idle_told(idle, document)]
        notes = (*spelling_notes, *as_warnings(told, topic="configuration"))
    return ExaminedConfig(
        problems=tuple(problems),
        config=config,
        faulty=tuple(path for finding in findings for path in finding.paths),
        notes=notes,
        name=document.name,
    )


def as_override(name: str, text: str, source: str | FilePath | None = None) -> str | None:
    """What to write on the command line for a key that is called by its last name, or as another tool calls it.

    text: its value, as typed. source: the configuration that it is for. None for what is no key.
    """
    try:
        document, problems = apply_overrides(read_source(_SMALLEST if source is None else source), [f"{name}={text}"])
    except ConfigError:  # of the file, which is told by itself
        return None if source is None else as_override(name, text)
    if problems:
        return None
    findings = [each for each in _examined(modernise(document)[0])[1] if document.place(each.path).is_override]
    if not findings:
        return f"write {line(name, value_at(document.data, tuple(name.split('.'))), as_override=True)}"
    finding = findings[0]
    if finding.kind == "unknown" and finding.expected and not finding.instead:  # the section's keys: no one is meant
        return None
    problem = to_problems([finding], document)[0]
    return problem.fix or f"the key is {name}: {problem.expected}"


def _idle_told(idle: Sequence[Finding], document: Document) -> Iterator[str]:
    """A note on other tools' keys that ask for nothing."""
    if idle:
        names = ", ".join(dotted(finding.path) for finding in idle)
        asks, they = ("asks", "it") if len(idle) == 1 else ("ask", "they")
        where = document.place(idle[0].path).where
        yield f"{where}: {names} {asks} for nothing that brim does not do by itself: {they} may go"


_SMALLEST = {"base_model": "model", "trainer": {"type": "finetune"}}


def _examined(document: Document) -> tuple[Config | None, list[Finding]]:
    """The configuration, with defaults in place of what is wrong with it, and all that is."""
    screened = screen(document.data)
    validated = validate(screened.data, screened.findings)
    findings = [*screened.findings, *validated.findings]
    config = None if validated.config is None else completed(validated.config)
    return config, findings if config is None else [*findings, *broken_rules(config, findings)]
