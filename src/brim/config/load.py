"""Load a configuration, and report everything that is wrong with it at once, with its place.

Before the check, overrides from the command line (`trainer.epochs=1`) are set, and Ludwig's names of keys that brim
has renamed are accepted with a note. What follows from
other keys is written out: the template of several inputs, the rules of labels.

Trust is not inherited: that a run's configuration allows to run code does not allow it on this machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, Path as FilePath
from typing import Any

from brim.config.findings import Finding, to_problems, validate
from brim.config.foreign import DATA_FILES
from brim.config.introspect import short_forms
from brim.config.ludwig import take_unsupported
from brim.config.prompts import joined_template
from brim.config.rules import broken_rules, notes_on
from brim.config.schema import Config, FinetuneTrainer
from brim.config.text import (
    MAX_DEPTH,
    Document,
    KeyPath,
    Place,
    dotted,
    line,
    mask_text,
    read_source,
    read_yaml,
    value_at,
    with_value,
)
from brim.errors import ConfigError, Problem
from brim.notes import as_warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """Hold a valid configuration, whose `auto` values are still to be resolved."""

    config: Config
    notes: tuple[str, ...]  # accepted older spellings, and keys that have no effect
    name: str  # the file as the user typed it, or "configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedConfig:
    """Hold what is wrong with a configuration, and what is known of it nevertheless."""

    problems: tuple[Problem, ...]
    config: Config | None  # with defaults in place of what is wrong; None if they cannot mend it
    faulty: tuple[KeyPath, ...]  # the keys that are wrong
    notes: tuple[str, ...]
    name: str

    def loaded(self) -> LoadedConfig:
        """Return the configuration, of one without problems."""
        assert self.config is not None, "without problems there is a configuration"
        return LoadedConfig(config=self.config, notes=self.notes, name=self.name)


def load_config(source: str | FilePath | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a YAML file or a mapping, set the overrides (`trainer.epochs=1`), check everything.

    Raises ConfigError with all problems in the order of the file, those of overrides last.
    """
    examined = examine_config(source, overrides)
    ConfigError.raise_for(examined.problems)
    return examined.loaded()


def examine_config(source: str | FilePath | Mapping[str, Any], overrides: Sequence[str] = ()) -> ExaminedConfig:
    """Load a configuration and return its problems. Raises ConfigError only if it cannot be read at all."""
    document, problems = apply_overrides(read_source(source), overrides)
    document, spelling_notes = modernise(document)
    config, findings = _examined(document)
    idle = [finding for finding in findings if finding.is_idle]
    findings = [finding for finding in findings if not finding.is_idle]
    problems = [*to_problems(findings, document), *problems]
    notes: tuple[str, ...] = ()
    if not problems and config is not None:
        found = [*notes_on(config, document), *_idle_notes(idle, document)]
        notes = (*spelling_notes, *as_warnings(found, topic="configuration"))
    return ExaminedConfig(
        problems=tuple(problems),
        config=config,
        faulty=tuple(path for finding in findings for path in finding.paths),
        notes=notes,
        name=document.name,
    )


def as_override(name: str, text: str, source: str | FilePath | None = None) -> str | None:
    """Say what to write on the command line for a key, given by its last part or by another tool's name.

    text: its value, as typed. source: the configuration that it is for. Returns None if the name is not a key's.
    """
    try:
        document, problems = apply_overrides(read_source(_SMALLEST if source is None else source), [f"{name}={text}"])
    except ConfigError:  # the file's fault, which is reported elsewhere
        return None if source is None else as_override(name, text)
    if problems:
        return None
    findings = [each for each in _examined(modernise(document)[0])[1] if document.place(each.path).is_override]
    if not findings:
        return f"write {line(name, value_at(document.data, tuple(name.split('.'))), as_override=True)}"
    finding = findings[0]
    if finding.kind == "unknown" and finding.expected and not finding.instead:  # any key of the section: none is meant
        return None
    problem = to_problems([finding], document)[0]
    return problem.fix or f"the key is {name}: {problem.expected}"


def _idle_notes(idle: Sequence[Finding], document: Document) -> Iterator[str]:
    """Yield a note on other tools' keys that ask for nothing."""
    if idle:
        names = ", ".join(dotted(finding.path) for finding in idle)
        asks, they = ("asks", "it") if len(idle) == 1 else ("ask", "they")
        where = document.place(idle[0].path).where
        yield f"{where}: {names} {asks} for nothing that brim does not do anyway: {they} can be removed"


_SMALLEST = {"base_model": "model", "trainer": {"type": "finetune"}}


def _examined(document: Document) -> tuple[Config | None, list[Finding]]:
    """Take unsupported keys out; return the configuration, with defaults for what is wrong, and the findings."""
    unsupported = take_unsupported(document.data)
    found, wrong = validate(document.data, unsupported)
    findings = [*unsupported, *wrong]
    config = None if found is None else completed(found)
    return config, findings if config is None else [*findings, *broken_rules(config, findings)]


def completed(config: Config) -> Config:
    """Write out what follows from a configuration: a template of several inputs, rules of labels. Idempotent."""
    if config.chat is not None:
        return config
    update: dict[str, object] = {}
    template = joined_template(config)
    if template is not None:
        update["prompt"] = config.prompt.model_copy(update={"template": template})
    feature = config.output_features[0]
    vocab = feature.preprocessing.vocab
    if feature.categories is not None and feature.categories.match is None and vocab and feature.fallback_label:
        update["output_features"] = (feature.with_labels_matched(vocab),)
    return config.model_copy(update=update) if update else config


_LONGEST_SHOWN = 80  # characters of an override, to name it


_AFTER_THE_FILE = 1_000_000_000  # the order of overrides: they are reported last


def apply_overrides(document: Document, overrides: Sequence[str]) -> tuple[Document, list[Problem]]:
    """Set every override, the last one wins; return the document and what is wrong with unreadable ones."""
    if isinstance(overrides, str | Mapping):
        raise ConfigError(
            what=f"overrides is {'a text' if isinstance(overrides, str) else 'a mapping'}",
            expected='a list of texts, each KEY=VALUE, such as ["trainer.epochs=1"]',
            fix=f"write overrides={[overrides]!r}" if isinstance(overrides, str) else "",
        )
    data, places = document.data, dict(document.places)
    problems: list[Problem] = []
    for index, (text, is_whole) in enumerate(_in_one(overrides)):
        shown = mask_text(text)
        shown = shown if len(shown) <= _LONGEST_SHOWN else shown[: _LONGEST_SHOWN - 1] + "…"
        place = Place(where=f"override {shown}", order=(_AFTER_THE_FILE + index, 0), is_override=True)
        try:
            written, value = _read(text, place, is_whole=is_whole)
            path, data = _set(data, written, value, (), place)
        except ConfigError as error:
            problems += error.problems
            continue
        places = {known: p for known, p in places.items() if known[: len(path)] != path}
        places[path] = place
        for length in range(1, len(path)):  # sections that the override makes
            places.setdefault(path[:length], place)
    return Document(name=document.name, data=data, places=places, has_lines=document.has_lines), problems


def _read(text: str, place: Place, *, is_whole: bool) -> tuple[tuple[str, ...], Any]:
    key, equals, written = text.partition("=")
    path = tuple(key.strip().split("."))
    fix = _meant(text, is_whole=is_whole)
    if fix or not equals or not all(path) or len(path) > MAX_DEPTH:
        expected = "KEY=VALUE, such as trainer.epochs=1"
        raise ConfigError(what="not an override", where=place.where, expected=expected, fix=fix)
    try:
        value, _ = read_yaml(written, "value")
    except ConfigError:
        what = "the value cannot be read as YAML"
        raise ConfigError(what=what, where=place.where, fix="put it in quotes") from None
    return path, value


def _in_one(overrides: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each override and whether it is one argument; a shell divides one with spaces around its sign."""
    rest = list(overrides)
    while rest:
        text, is_whole = rest.pop(0), True
        while rest and "=" not in rest[0].lstrip("=") and (rest[0].startswith("=") or _is_open(text)):
            text, is_whole = f"{text} {rest.pop(0)}", False
        yield text, is_whole


def _is_open(text: str) -> bool:
    return text.endswith("=") or (text.endswith(":") and "=" not in text)


def _meant(text: str, *, is_whole: bool) -> str:
    """Say what to write instead of a text that was meant as an override; empty if it is one, or is unclear."""
    if "=" not in text and text.lower().endswith(DATA_FILES):
        return "write --dataset before each file; or put a pattern in quotes, so that the shell hands it on as it is"
    if "=" not in text and text.lower().endswith((".yaml", ".yml")):
        return "name one configuration; `brim compare` takes several"
    if text.startswith(_DASHES):
        return f"it begins with a long dash, as word processors write one: write --{text.lstrip(''.join(_DASHES))}"
    if text.startswith(_QUOTES) and text.endswith(_QUOTES):
        return f"write {text.strip(''.join(_QUOTES))}; your shell hands quotes of this kind on: take plain double ones"
    spaced = _SPACED.fullmatch(text)
    if spaced is None or (is_whole and spaced[2] == "="):
        return ""
    return f"write {shlex.quote(f'{spaced[1]}={spaced[3]}')}, with = and no spaces around it"


_DASHES, _QUOTES = ("–", "—"), ("'", '"', "“", "”", "‘", "’", "„")


_SPACED = re.compile(r"([A-Za-z]\w+(?:\.\w+)*)\s*([:=])\s*([^\s=\\/].*)")


def _set(data: Any, path: tuple[str, ...], value: Any, done: KeyPath, place: Place) -> tuple[KeyPath, Any]:
    """Return the path, with list positions as numbers, and a copy of the data with the value set there."""
    if not path:
        return done, value
    head, rest = path[0], path[1:]
    if isinstance(data, list) or (data is None and head == "0"):
        entries = data or []
        index = _index(head, entries, done, place)
        known = entries[index] if index < len(entries) else None
        done, changed = _set(known, rest, value, (*done, index), place)
        return done, [*entries[:index], changed, *entries[index + 1 :]]
    data = _as_mapping(data, done, place)
    done, changed = _set(data.get(head), rest, value, (*done, head), place)
    return done, {**data, head: changed}


def _index(text: str, entries: list[Any], done: KeyPath, place: Place) -> int:
    if text.isdecimal() and int(text) <= len(entries):
        return int(text)
    raise ConfigError(
        what=f"{dotted(done)} is a list and has no entry {text}",
        where=place.where,
        expected=f"a number from 0 to {len(entries)}, such as {dotted(done)}.0",
    )


def _as_mapping(data: Any, done: KeyPath, place: Place) -> dict[str, Any]:
    """Return the section to set a key in: a new one if there is none, `{type: …}` if only its type was given."""
    if data is None:
        return {}
    if isinstance(data, dict):
        return data
    pattern = tuple("*" if isinstance(part, int) else part for part in done)
    if isinstance(data, str) and pattern in short_forms():
        return {short_forms()[pattern]: data}
    raise ConfigError(
        what=f"{dotted(done)} holds a single value and no keys", where=place.where, expected=f"{dotted(done)}=VALUE"
    )


_SCHEDULER = ("trainer", "learning_rate_scheduler")
_OLD, _NEW = "wsd_decay_fraction", "decay_fraction"


def modernise(document: Document) -> tuple[Document, tuple[str, ...]]:
    """Return the document in brim's spelling, bare texts written out (`{type: lora}`), and a note for each change."""
    notes = []
    data, places = _expanded(document.data, ()), dict(document.places)
    section, old, new = value_at(data, _SCHEDULER), (*_SCHEDULER, _OLD), (*_SCHEDULER, _NEW)
    if isinstance(section, dict) and _OLD in section and _NEW not in section:
        renamed = {_NEW if key == _OLD else key: value for key, value in section.items()}
        data = with_value(data, _SCHEDULER, renamed)
        if old in places:
            places[new] = places[old]
        notes.append(f"{document.place(old).where}: {dotted(old)} is read as {dotted(new)}")
    if "ludwig_version" in data:
        notes.append(f"{document.place(('ludwig_version',)).where}: ludwig_version has no effect")
        del data["ludwig_version"]
    return replace(document, data=data, places=places), tuple(notes)


def _expanded(value: Any, pattern: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _expanded(item, (*pattern, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, (*pattern, "*")) for item in value]
    name = short_forms().get(pattern) if isinstance(value, str) else None
    return value if name is None else {name: value}


def require_trust_said_again(config: Config, overrides: Sequence[str], where: Path, *, begins: bool = False) -> None:
    """Raise ConfigError where a run's configuration, and no override, asks to run code.

    where: its config.yaml. begins: a run is planned or begun from it, which calls its batch_increase_function; a run
    that goes on has the sizes in its checkpoint.
    """
    overridden = {override.partition("=")[0].strip() for override in overrides}
    function = config.trainer.batch_increase_function if isinstance(config.trainer, FinetuneTrainer) else None
    asked = []  # key, what it does, whose code runs, and its values for yes and no
    if config.trust_remote_code:
        asked.append(("trust_remote_code", "is true", "the base model's code", "true", "false"))
    if begins and isinstance(function, str):
        asked.append(("trainer.batch_increase_function", "names code", function, function, "null"))
    ConfigError.raise_for(
        Problem(
            what=f"{key} {does} in the configuration of a run, which does not decide that for this machine",
            where=str(where),
            expected="your own word for it",
            fix=f"if you trust {code}, add {key}={yes} to the command; otherwise {key}={no}",
        )
        for key, does, code, yes, no in asked
        if key not in overridden
    )
