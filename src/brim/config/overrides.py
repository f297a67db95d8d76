"""Overrides from the command line: `trainer.epochs=1`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from brim.config.foreign_values import DATA_FILES
from brim.config.mask import mask_text
from brim.config.places import Document, Path, Place, dotted
from brim.config.schema_walk import short_forms
from brim.config.yaml_reader import MAX_DEPTH, read_yaml
from brim.errors import ConfigError, Problem

_SEVERAL_FILES = "write --dataset before each file; or put a pattern in quotes, so that the shell hands it on as it is"
_LONGEST_SHOWN = 80  # characters of an override, to name it
_AFTER_THE_FILE = 1_000_000_000  # the order of overrides: they are told last


def apply_overrides(document: Document, overrides: Sequence[str]) -> tuple[Document, list[Problem]]:
    """The document with every override set, the last one winning; and what is wrong with those that cannot be read."""
    if isinstance(overrides, str | Mapping):
        raise ConfigError(
            Problem(
                what=f"overrides is {'a text' if isinstance(overrides, str) else 'a mapping'}",
                expected='a list of texts, each KEY=VALUE, such as ["trainer.epochs=1"]',
                fix=f"write overrides={[overrides]!r}" if isinstance(overrides, str) else "",
            )
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
        raise ConfigError(Problem(what="not an override", where=place.where, expected=expected, fix=fix))
    try:
        value, _ = read_yaml(written, "value")
    except ConfigError:
        what = "the value cannot be read as YAML"
        raise ConfigError(Problem(what=what, where=place.where, fix="put it in quotes")) from None
    return path, value


def _in_one(overrides: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Each override, in one piece where a shell made several of it, since spaces stood around its sign; else True."""
    rest = list(overrides)
    while rest:
        text, is_whole = rest.pop(0), True
        while rest and "=" not in rest[0].lstrip("=") and (rest[0].startswith("=") or _is_open(text)):
            text, is_whole = f"{text} {rest.pop(0)}", False
        yield text, is_whole


def _is_open(text: str) -> bool:
    return text.endswith("=") or (text.endswith(":") and "=" not in text)


def _meant(text: str, *, is_whole: bool) -> str:
    """What to write instead of what was surely meant as an override, and is none; empty where it is one, or unclear."""
    if "=" not in text and text.lower().endswith(DATA_FILES):
        return _SEVERAL_FILES
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


def _set(data: Any, path: tuple[str, ...], value: Any, done: Path, place: Place) -> tuple[Path, Any]:
    """The path with list positions as numbers, and a copy of the data in which it holds the value."""
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


def _index(text: str, entries: list[Any], done: Path, place: Place) -> int:
    if text.isdecimal() and int(text) <= len(entries):
        return int(text)
    raise ConfigError(
        Problem(
            what=f"{dotted(done)} is a list and has no entry {text}",
            where=place.where,
            expected=f"a number from 0 to {len(entries)}, such as {dotted(done)}.0",
        )
    )


def _as_mapping(data: Any, done: Path, place: Place) -> dict[str, Any]:
    """The section to set a key in: a new one where there is none, `{type: …}` where it was given in short."""
    if data is None:
        return {}
    if isinstance(data, dict):
        return data
    pattern = tuple("*" if isinstance(part, int) else part for part in done)
    if isinstance(data, str) and pattern in short_forms():
        return {short_forms()[pattern]: data}
    raise ConfigError(
        Problem(
            what=f"{dotted(done)} holds a single value and no keys",
            where=place.where,
            expected=f"{dotted(done)}=VALUE",
        )
    )
