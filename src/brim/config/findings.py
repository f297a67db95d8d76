"""Check plain values against the schema, and describe what is wrong, before it is known where that stands.

For an unknown key the finding names what other tools mean by it, the valid key that is meant, or the place where it
belongs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from brim.config.foreign import ForeignKey, Help, Lines, foreign_keys, foreign_values
from brim.config.introspect import (
    all_keys,
    expected,
    join,
    kind_of_entries,
    kinds_of_values,
    options,
    sections_of,
    type_name,
)
from brim.config.schema import Config, NoTrainer, Section
from brim.config.text import (
    Document,
    KeyPath,
    contains,
    dotted,
    is_within,
    line,
    misspelt,
    shortened,
    show,
    value_at,
    with_value,
)
from brim.errors import Problem

_ELSEWHERE = 3  # naming more places than these would not help


_MINIMAL = {"base_model": "model"}


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
    whole: Any = _MINIMAL
    for key, value in (*_needed(key for key, _ in lines), *lines):
        whole = with_value(whole, tuple(key.split(".")), value)
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


_MAX_REPAIRS = 5


def validate(data: dict[str, Any], known: list[Finding]) -> tuple[Config | None, list[Finding]]:
    """Check the values; return the configuration, with defaults in place of what is wrong, and the findings.

    known: findings that have been reported already, with all that lies below their keys. A faulty value is replaced by
    its default and the rest is checked again, so that a fault in one place hides none in another. If defaults cannot
    mend the configuration, it is None.
    """
    findings: list[Finding] = []
    written: dict[KeyPath, KeyPath] = {}  # the key that is meant: the misspelt one in its place
    for attempt in range(_MAX_REPAIRS):
        try:
            return Config.model_validate(data), findings
        except ValidationError as error:
            details = [detail for detail in error.errors(include_url=False) if not _is_short_by_faults(detail)]
            found = _unique([_translate(detail, data) for detail in details])
        meant = [(*finding.path[:-1], finding.meant) for finding in found if finding.meant]
        found = [finding for finding in found if finding.kind != "missing" or finding.path not in meant]
        reported = [path for finding in (*known, *findings) for path in finding.paths]
        fresh = [finding for finding in found if not is_within(finding.path, reported)]
        if attempt > 0:  # a section that a repair left incomplete
            fresh = [finding for finding in fresh if not any(is_within(path, [finding.path]) for path in reported)]
        findings += [_at_written(finding, written) for finding in fresh]
        written |= {(*finding.path[:-1], finding.meant): finding.path for finding in found if finding.meant}
        for finding in found:
            data = _repaired(data, finding)
    return None, findings


def _is_short_by_faults(detail: ErrorDetails) -> bool:
    """Return whether pydantic calls a list too short only since it does not count faulty entries, which it reports."""
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def _at_written(finding: Finding, written: dict[KeyPath, KeyPath]) -> Finding:
    """Place the finding at the misspelt key, if it is about such a key's value."""
    for meant, path in written.items():
        if is_within(finding.path, [meant]):
            return replace(finding, paths=(*finding.paths, path))
    return finding


def _translate(detail: ErrorDetails, data: dict[str, Any]) -> Finding:
    """Turn one of pydantic's errors into a finding at a key of the schema."""
    spot = _locate(detail["loc"], data)
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return unknown_key(spot.path, spot.sections, data)
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_type(spot, data)
    if not contains(data, spot.path):
        if spot.path and isinstance(spot.path[-1], int):
            return _wrong_value(_Spot(path=spot.path[:-1], field=spot.field, sections=()), data)
        return Finding(
            paths=(spot.path,),
            what=f"{dotted(spot.path)} is missing",
            expected=expected(spot.field),
            fix=f"add it. {spot.field.description}",
            kind="missing",
        )
    return _wrong_value(spot, data, fix=str(detail.get("ctx", {}).get("fix", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """Hold where an error of pydantic's lies."""

    path: KeyPath
    field: Any  # the FieldInfo of the last key on the path that the schema knows
    sections: tuple[type[Section], ...]  # that may stand there
    is_entry: bool = False  # of the field's list or mapping, rather than its whole value


def _locate(loc: tuple[int | str, ...], data: dict[str, Any]) -> _Spot:
    """Find the key that a location means: pydantic adds names of union branches, and goes below single values."""
    sections: tuple[type[Section], ...] = (Config,)
    path: KeyPath = ()
    field: Any = None
    kind: type[int | str] | None = None  # of the entries' names, where the key holds several sections
    is_entry = False
    for part in loc:
        if kind is not None and isinstance(part, kind):
            path, kind, is_entry = (*path, part), None, True
        elif len(sections) > 1 and part in (names := {type_name(s): s for s in sections}):
            sections = (names[str(part)],)
        elif len(sections) == 1 and part in sections[0].model_fields:
            field = sections[0].model_fields[str(part)]
            path, sections, kind, is_entry = (*path, part), sections_of(field), kind_of_entries(field), False
        elif len(sections) == 1 and kind is not int:
            return _Spot(path=(*path, str(part)), field=field, sections=sections)
        else:
            break
    return _Spot(path=path, field=field, sections=sections, is_entry=is_entry)


def _wrong_type(spot: _Spot, data: dict[str, Any]) -> Finding:
    value = value_at(data, spot.path)
    names = [name for section in spot.sections if (name := type_name(section)) is not None]
    given = value.get("type") if isinstance(value, dict) else value
    path = (*spot.path, "type") if isinstance(value, dict) else spot.path
    guess = misspelt(given, names) if isinstance(given, str) else None
    finding = Finding(
        paths=(path,),
        what=f"{dotted(path)} is {show(given)}",
        expected=join(names),
        fix=f"did you mean {guess}?" if guess else "",
        kind="type",
    )
    return _with_foreign_value(finding, data)


def _with_foreign_value(finding: Finding, data: dict[str, Any]) -> Finding:
    """Add to the finding what other tools mean by the value, if they mean something."""
    helped = foreign_value(finding.path, data)
    return finding if helped is None else replace(finding, fix=helped.words, instead=helped.lines)


def _wrong_value(spot: _Spot, data: dict[str, Any], *, fix: str = "") -> Finding:
    """Describe a wrong value. fix: the advice of one of brim's validators; if empty, the value suggests one."""
    value = value_at(data, spot.path)
    words = "a mapping" if spot.is_entry and spot.sections else expected(spot.field)
    finding = Finding(
        paths=(spot.path,),
        what=f"{dotted(spot.path)} is {show(value)}",
        expected=words,
        fix=fix or _hint(value, words, options(spot.field)),
        kind="value",
    )
    return _with_foreign_value(finding, data)


def _hint(value: Any, words: str, choices: list[str]) -> str:
    if isinstance(value, str):
        if "number" in words and _is_number(value):
            return f"write {float(value):g} without quotes" if "e" not in value.lower() else f"write {float(value)!r}"
        if words.startswith("true or false") and value.lower() in ("yes", "no", "on", "off", "true", "false"):
            return f"write {'true' if value.lower() in ('yes', 'on', 'true') else 'false'}"
        guess = misspelt(value, choices)
        return f"did you mean {guess}?" if guess else ""
    if words.startswith("a duration") and _is_amount(value):
        return f"add the unit: {value:g}dur for a share of the run" if value <= 1 else f"add the unit: {value:g}ba"
    if words.startswith("text") and value is not None and not isinstance(value, (dict, list)):
        return "put it in quotes"
    return ""


def _is_amount(value: Any) -> bool:
    """Return whether it is a number of at least 0: not a bool, and not YAML's infinity or nan."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) < float("inf")
    except ValueError:
        return False


def _unique(findings: list[Finding]) -> list[Finding]:
    """Keep one finding a key: pydantic reports each branch of a union."""
    return list({finding.path: finding for finding in reversed(findings)}.values())[::-1]


def _repaired(data: Any, finding: Finding) -> Any:
    """Return a copy in which the fault is replaced by the key's default or, without one, by a stand-in."""
    path = finding.path
    if finding.kind == "missing":
        return with_value(data, path, _stand_in(path))
    if finding.meant and not contains(data, (*path[:-1], finding.meant)):
        data = with_value(data, (*path[:-1], finding.meant), value_at(data, path))
    if finding.kind == "type" and path == ("trainer", "type"):
        return with_value(data, path, "finetune")  # so that its other keys are checked, too
    if finding.kind == "type" and path[-1] == "type":
        path = path[:-1]
    return _without(data, path)


def _stand_in(path: KeyPath) -> Any:
    name = path[-1]
    if name in ("input_features", "output_features"):
        return [{"name": f"({name})", "type": "text"}]
    if name == "type" and path[2:4] == ("decoder", "match"):
        return "contains"
    if name == "type":
        return "text" if path[0] in ("input_features", "output_features") else "lora"
    return f"({dotted(path)})"


def _without(data: Any, path: KeyPath) -> Any:
    head, *rest = path
    if isinstance(data, list):
        kept = [(_without(x, tuple(rest)) if rest else None) if i == head else x for i, x in enumerate(data)]
        return [x for i, x in enumerate(kept) if rest or i != head]
    if not isinstance(data, dict) or head not in data:
        return data
    if rest:
        return {**data, str(head): _without(data[str(head)], tuple(rest))}
    return {key: value for key, value in data.items() if key != head}
