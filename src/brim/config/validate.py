"""Check plain values against the schema, and say in plain words what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from brim.config.findings import Finding, foreign_value, unknown_key
from brim.config.introspect import expected, is_list, is_mapping, join, options, sections_of, type_name
from brim.config.schema import Config, Section
from brim.config.text import KeyPath, contains, dotted, is_within, misspelt, show, value_at, with_value

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
    in_list = in_mapping = is_entry = False
    for part in loc:
        if (in_list and isinstance(part, int)) or (in_mapping and isinstance(part, str)):
            path, in_list, in_mapping, is_entry = (*path, part), False, False, True
        elif len(sections) > 1 and part in (names := {type_name(s): s for s in sections}):
            sections = (names[str(part)],)
        elif len(sections) == 1 and part in sections[0].model_fields:
            field = sections[0].model_fields[str(part)]
            path, sections, is_entry = (*path, part), sections_of(field), False
            in_list, in_mapping = is_list(field), is_mapping(field)
        elif len(sections) == 1 and not in_list:
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
