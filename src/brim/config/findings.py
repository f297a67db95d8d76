"""Describe what is wrong with a configuration, before it is known where that stands.

For an unknown key the finding names what other tools mean by it, the valid key that is meant, or the place where it
belongs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from pydantic import ValidationError

from brim.config.foreign import ForeignKey, Help, Lines, foreign_keys, foreign_values
from brim.config.introspect import all_keys, expected, kinds_of_values, type_name
from brim.config.schema import Config, NoTrainer, Section
from brim.config.text import Document, KeyPath, dotted, line, misspelt, shortened, value_at
from brim.errors import Problem

_ELSEWHERE = 3  # naming more places than these would not help


_MINIMAL: dict[str, Any] = {"base_model": "model"}


def unknown_key(path: KeyPath, sections: tuple[type[Section], ...], data: dict[str, Any]) -> Finding:
    """Describe a key that its section does not have."""
    section, value = sections[0], value_at(data, path)
    finding = Finding(paths=(path,), what=f"unknown key {shortened(dotted(path))}", kind="unknown")
    other_type = _type_that_has_it(path, section)
    if other_type:
        parent = dotted(path[:-1])
        what = f"{dotted(path)} has no place with {parent}.type: {_given_type(path, data, section)}"
        return replace(finding, what=what, fix=f"remove it, or set {parent}.type: {other_type}")
    helped = _foreign_help(path, data) or _elsewhere(path, data)
    if helped is not None:
        return replace(finding, fix=helped.words, instead=helped.lines, is_idle=helped.is_idle)
    meant = misspelt_key(str(path[-1]), value, section)
    if meant is not None:
        return replace(finding, fix=f"did you mean {dotted((*path[:-1], meant))}?", meant=meant)
    return replace(finding, expected="one of " + ", ".join(section.model_fields), fix="remove it")


def misspelt_key(name: str, value: Any, section: type[Section]) -> str | None:
    """Return the key of a section that is surely meant, unless it takes values of another kind."""
    meant = misspelt(name, section.model_fields)
    if meant is None or meant.lower() == name.lower().replace("-", "_") or value is None:
        return meant
    return meant if _kind(value) & kinds_of_values(section.model_fields[meant]) else None


def foreign_value(path: KeyPath, data: dict[str, Any]) -> Help | None:
    """Return what to write instead of a value of brim's own key, if other tools mean something by that value."""
    value = value_at(data, path)
    for entry in _named(path, foreign_values()):
        helped = entry.answer(value)
        if helped.words and not helped.lines:
            return helped
        return _writable(helped, data) if helped.lines != ((dotted(path), value),) else None
    return None


def _foreign_help(path: KeyPath, data: dict[str, Any]) -> Help | None:
    """Return what to do about another tool's key."""
    value = value_at(data, path)
    for entry in _named(path, foreign_keys()):
        if value is None:
            return Help(words="remove it: null asks for nothing", is_idle=True)
        helped = entry.answer(value)
        if helped.lines:
            return _writable(helped, data) or Help(words=f"the key is {entry.target}: {_expected(entry.target)}")
        return helped
    return None


def _named(path: KeyPath, entries: Iterable[ForeignKey]) -> Iterable[ForeignKey]:
    """Yield the entries for this key: those with its name and, if theirs is dotted, its sections."""
    place = f".{dotted(path)}"
    for entry in entries:
        for name in entry.names:
            if place.endswith(f".{name}") or (name.endswith("*") and str(path[-1]).startswith(name[:-1])):
                yield entry
                break


def _elsewhere(path: KeyPath, data: dict[str, Any]) -> Help | None:
    """Return where a key of exactly this name belongs, with its value if there is only one such place."""
    name, value = str(path[-1]), value_at(data, path)
    places = _places(name)
    if not 1 <= len(places) <= _ELSEWHERE:
        return None
    if len(places) == 1 and "." not in places[0] and value_at(data, (name,)) is None:
        return Help(words=f"{name} belongs to the root")
    helped = _writable(Help(lines=((places[0], value),)), data) if len(places) == 1 and value is not None else None
    return helped or Help(words=f"{name} belongs elsewhere: {' or '.join(places)}")


def _writable(helped: Help, data: dict[str, Any]) -> Help | None:
    """Return the lines, and the types that they need beside them; None if the schema refuses a value."""
    lines: list[tuple[str, Any]] = []
    for key, value in helped.lines:
        whole = next((each for each in _forms(value) if _accepts(((key, each),))), None)
        if whole is None and value is not None:
            return None
        lines.append((key, whole))
    needed = tuple(each for each in _needed(key for key, _ in lines) if not _is_given(each, data) and each not in lines)
    return Help(lines=(*lines, *needed), words=helped.words)


def _forms(value: Any) -> list[Any]:
    """Return a value and, if it is a whole number written as a float, the integer: other tools write counts so."""
    return [value, int(value)] if isinstance(value, float) and value.is_integer() else [value]


def _needed(keys: Iterable[str]) -> Lines:
    """Return the types of sections without which the keys would not be allowed."""
    needed: dict[str, Any] = {}
    for key in keys:
        head, _, rest = key.partition(".")
        if head == "adapter":
            needed["adapter.type"] = "lora"
        elif head == "trainer" and rest.partition(".")[0] not in NoTrainer.model_fields:
            needed["trainer.type"] = "finetune"
    return tuple(needed.items())


def _is_given(each: tuple[str, Any], data: dict[str, Any]) -> bool:
    return bool(value_at(data, tuple(each[0].split("."))) == each[1])


def _accepts(lines: Lines) -> bool:
    """Return whether the schema accepts the lines."""
    whole = dict(_MINIMAL)
    for key, value in (*_needed(key for key, _ in lines), *lines):
        *parents, last = key.split(".")
        at = whole
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    try:
        Config.model_validate(whole)
    except ValidationError:
        return False
    return True


def _expected(target: str) -> str:
    path = tuple(target.split("."))
    fields = [key.field for key in all_keys() if key.path == path and key.section is not NoTrainer]
    return expected(fields[0])


def _kind(value: Any) -> set[str]:
    if isinstance(value, str):
        return {"text", "number"} if value.replace(".", "", 1).lstrip("-").isdecimal() else {"text"}
    names = {bool: "true or false", int: "number", float: "number", list: "list", dict: "mapping"}
    return {names.get(type(value), "text")}


@cache
def _places(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(".".join(key.path).replace("*", "0") for key in all_keys() if key.name == name))


def _type_that_has_it(path: KeyPath, section: type[Section]) -> str | None:
    """Return another type of the same section that has the key."""
    pattern = tuple("*" if isinstance(part, int) else part for part in path)
    for key in all_keys():
        if key.path == pattern and key.section is not section and type_name(key.section) is not None:
            return type_name(key.section)
    return None


def _given_type(path: KeyPath, data: dict[str, Any], section: type[Section]) -> str:
    parent = value_at(data, path[:-1])
    given = parent.get("type") if isinstance(parent, dict) else None
    return str(given or type_name(section))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Hold one thing that is wrong with the keys at `paths`; its place is that of the first that the user gave."""

    paths: tuple[KeyPath, ...]
    what: str
    expected: str = ""
    fix: str = ""
    kind: Literal["unknown", "missing", "value", "type", "rule"] = "rule"
    meant: str = ""  # the key of the same section that an unknown key surely stands for
    instead: tuple[tuple[str, Any], ...] = ()  # dotted keys to write, with their values
    is_idle: bool = False  # it asks for nothing: not an error, but a note

    @property
    def path(self) -> KeyPath:
        return self.paths[0]

    @classmethod
    def of_both(cls, first: KeyPath, second: KeyPath) -> Finding:
        """Describe two keys of a section of which only one may be given."""
        what = f"{dotted(first)} and {second[-1]} are both given"
        return cls(paths=(first, second), what=what, fix="keep one of them")


def to_problems(findings: Iterable[Finding], document: Document) -> list[Problem]:
    """Return the findings with their places, in the order of the file; overrides come last."""
    placed = []
    for finding in findings:
        given = [path for path in finding.paths if path in document.places]
        given.sort(key=lambda path: not document.places[path].is_override)
        place = document.place(given[0] if given else finding.path)
        fix = _with_lines(finding, as_override=place.is_override)
        problem = Problem(what=finding.what, where=place.where, expected=finding.expected, fix=fix)
        placed.append((place.order, problem))
    return [problem for _, problem in sorted(placed, key=lambda item: item[0])]


def _with_lines(finding: Finding, *, as_override: bool) -> str:
    """Return what to do, with the exact text to write in the file or on the command line."""
    if not finding.instead:
        return finding.fix
    texts = [line(key, value, as_override=as_override) for key, value in finding.instead]
    return f"write {' and '.join(texts)}" + (f" ({finding.fix})" if finding.fix else "")
