"""Walk the schema: list which keys there are, at which path, and what their values may be.

The configuration's JSON Schema, for editors, is made from it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from brim.config.schema import Config, Section, Short

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) with a description of every key; brim's own are marked with `x-brim`."""
    schema = _without_expected(Config.model_json_schema())
    for name in _sections_that_need_a_type():
        definition = schema["$defs"][name]
        definition["required"] = sorted({*definition.get("required", ()), "type"})
    return {"$schema": _DIALECT, **schema, "title": "brim configuration"}


def _sections_that_need_a_type() -> Iterator[str]:
    """Yield the names of sections that are chosen by `type`, except those that a missing type stands for."""
    for key in all_keys():
        marker = typed_marker(key.field)
        if marker is not None:
            yield from (each.__name__ for each in sections_of(key.field) if type_name(each) != marker.default)


def _without_expected(schema: Any) -> Any:
    """Return the schema without the words that are meant for error messages."""
    if isinstance(schema, dict):
        return {name: _without_expected(item) for name, item in schema.items() if name != "x-expected"}
    return [_without_expected(item) for item in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Hold one key of the schema."""

    path: tuple[str, ...]  # "*" stands for an entry of a list, or of a mapping of sections
    section: type[Section]  # that the key belongs to
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def is_brims_own(self) -> bool:
        return bool(_extra(self.field).get("x-brim", False))

    @property
    def description(self) -> str:
        return self.field.description or ""


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key in the schema's order; a key that several types of a section have comes once for each."""
    return tuple(_keys(Config, ()))


@cache
def short_forms() -> Mapping[tuple[str, ...], str]:
    """Return the sections that may be written as a bare text, each with the key that the text is for, mostly `type`."""
    return {key.path: mark.name for key in all_keys() for mark in key.field.metadata if isinstance(mark, Short)}


def _keys(section: type[Section], path: tuple[str, ...]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        yield Key(path=(*path, name), section=section, field=field)
        below = (*path, name) if kind_of_entries(field) is None else (*path, name, "*")
        for inner in sections_of(field):
            yield from _keys(inner, below)


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """Return the sections that a key may hold; several if `type` decides."""
    return tuple(t for t in _alternatives(field.annotation) if isinstance(t, type) and issubclass(t, Section))


def kind_of_entries(field: FieldInfo) -> type[int | str] | None:
    """Return what tells a key's sections apart: numbers in a list, free names in a mapping; None for a single one."""
    origins = {get_origin(member) for member in _members(field.annotation)} if sections_of(field) else set()
    return int if tuple in origins else str if Mapping in origins else None


def type_name(section: type[Section]) -> str | None:
    """Return the name by which `type` chooses the section."""
    field = section.model_fields.get("type")
    names = get_args(field.annotation) if field is not None else ()
    return str(names[0]) if names else None


def typed_marker(field: FieldInfo) -> Short | None:
    """Return the mark of a section that may be written as the bare name of its type."""
    return next((mark for mark in field.metadata if isinstance(mark, Short) and mark.types), None)


def expected(field: FieldInfo, *, quote: str = "") -> str:
    """Say in words what a key's value may be; fixed choices are put between `quote`s."""
    declared = _extra(field).get("x-expected")
    if declared:
        return str(declared)
    words = _words(field.annotation, field.metadata, quote)
    marker = typed_marker(field)
    if marker is not None:
        null = [word for word in words if word == f"{quote}null{quote}"]
        words = [*(f"{quote}{name}{quote}" for name in marker.types), "a mapping with type", *null]
    return join(words)


def options(field: FieldInfo) -> list[str]:
    """Return the texts that a key accepts, if it has fixed choices, and the types of its sections."""
    marker = typed_marker(field)
    literals = [each for each in _members(field.annotation) if get_origin(each) is Literal]
    return [word for each in literals for word in _words(each, (), "")] + list(marker.types if marker else ())


def kinds_of_values(field: FieldInfo) -> frozenset[str]:
    """Return the kinds of values that a key accepts: "number", "text", "true or false", "list" and "mapping"."""
    kinds = set()
    for member in _members(field.annotation):
        origin = get_origin(member)
        if origin is Literal:
            kinds |= {_KINDS[type(choice)] for choice in get_args(member)}
        elif isinstance(member, type) and issubclass(member, Section):
            kinds.add("mapping")
        elif member is not type(None):
            kinds.add("list" if origin is tuple else "mapping" if origin is Mapping else _KINDS.get(member, "text"))
    marked = any(isinstance(mark, Short) for mark in field.metadata)
    return frozenset(kinds | {"text"} if marked else kinds)


_KINDS: Mapping[Any, str] = {bool: "true or false", int: "number", float: "number", str: "text"}


def join(words: list[str]) -> str:
    """Join words to `a, b or c`; with a comma before `or` if one of them has a space."""
    unique = list(dict.fromkeys(words))
    if len(unique) == 1:
        return unique[0]
    comma = "," if any(" " in word for word in unique) else ""
    return f"{', '.join(unique[:-1])}{comma} or {unique[-1]}"


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of a type, without their annotations."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _alternatives(annotation: Any) -> list[Any]:
    """Return the alternatives of a type, and of a list or mapping those of its entries."""
    found = []
    for member in _members(annotation):
        if get_origin(member) is tuple:
            found += _alternatives(get_args(member)[0])
        elif get_origin(member) is Mapping:
            found += _alternatives(get_args(member)[1])
        else:
            found.append(member)
    return found


def _words(annotation: Any, metadata: Any, quote: str) -> list[str]:
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return _words(inner, marks, quote)
    if get_origin(annotation) in (Union, types.UnionType):
        return [word for part in get_args(annotation) for word in _words(part, (), quote)]
    if get_origin(annotation) is Literal:
        choices = (str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(annotation))
        return [f"{quote}{choice}{quote}" for choice in choices]
    if get_origin(annotation) is tuple:
        return ["a list"]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return ["a mapping"]
    if annotation in (int, float):
        return ["a " + ("whole number" if annotation is int else "number") + _range(_bounds(metadata))]
    return [{bool: "true or false", str: "text", type(None): f"{quote}null{quote}"}[annotation]]


def _bounds(metadata: Any) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    for mark in metadata:
        for name in ("ge", "gt", "le", "lt"):
            if getattr(mark, name, None) is not None:
                bounds[name] = getattr(mark, name)
        if isinstance(mark, FieldInfo):
            bounds |= _bounds(mark.metadata)
    return bounds


def _range(bounds: dict[str, Any]) -> str:
    if "ge" in bounds and "le" in bounds:
        return f" from {bounds['ge']} to {bounds['le']}"
    words = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = " and ".join(f"{words[name]} {bounds[name]}" for name in words if name in bounds)
    return f" of {limits}" if limits.startswith("at most") else f" {limits}" if limits else ""
