"""The grammar of prompt templates: `{column}`, `{column:.2f}`, `{{` and `}}`. Never more than plain names.

Python's str.format would follow `{x.__class__}` into the interpreter; here a name is looked up among the row's values,
and nothing else happens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from brim.errors import ConfigError, DataError, Problem

SAMPLE = "__sample__"  # the input feature's value
TASK = "__task__"  # prompt.task
CONTEXT = "__context__"  # the retrieved rows
LABELS = "__labels__"  # those of the category that is asked for

_PLACEHOLDERS = (SAMPLE, TASK, CONTEXT, LABELS)
_NAME = re.compile(r"[^\s{}\[\].!:'\"\\](?:[^{}\[\].!:'\"\\\n\t\r]*[^\s{}\[\].!:'\"\\]\.?)?")
# fill and align, sign, #, 0, width, grouping, precision, type; widths of at most three digits, so that no text explodes
_FORMAT_SPEC = re.compile(r"(?:[^{}]?[<>=^])?[+\- ]?#?0?\d{0,3}[,_]?(?:\.\d{1,2})?[bcdeEfFgGosxX%]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """`{name}` or `{name:format_spec}`."""

    name: str
    format_spec: str = ""


Parts: TypeAlias = tuple[str | Placeholder, ...]


def parse_template(template: str) -> Parts:
    """Literal texts and placeholders in turn. Raises ConfigError with every fault of the template."""
    parts: list[str | Placeholder] = []
    literal: list[str] = []
    problems: list[Problem] = []
    position = 0
    while position < len(template):
        character = template[position]
        if template.startswith(("{{", "}}"), position):
            literal.append(character)
            position += 2
        elif character == "{":
            end = template.find("}", position)
            if end < 0:
                problems.append(_fault("a { is never closed", template[position : position + 20], _BRACES))
                break
            parts += ["".join(literal)] if literal else []
            literal = []
            parts += _placeholder(template[position + 1 : end], problems)
            position = end + 1
        elif character == "}":
            problems.append(_fault("a } closes nothing", template[max(0, position - 20) : position + 1], _BRACES))
            position += 1
        else:
            literal.append(character)
            position += 1
    if problems:
        raise ConfigError(*problems)
    return (*parts, "".join(literal)) if literal else tuple(parts)


def render(parts: Parts, values: Mapping[str, Any]) -> str:
    """The text for one row. Raises DataError when a value does not fit its number format."""
    return "".join(part if isinstance(part, str) else _formatted(part, values[part.name]) for part in parts)


def names(parts: Parts) -> tuple[str, ...]:
    """The names that the template uses, each once, in order."""
    return tuple(dict.fromkeys(part.name for part in parts if isinstance(part, Placeholder)))


def is_plain_name(name: str) -> bool:
    """Whether a column's name may stand in braces."""
    return _NAME.fullmatch(name) is not None


_BRACES = "write {{ and }} for literal braces"


def _placeholder(text: str, problems: list[Problem]) -> Iterable[Placeholder]:
    """The placeholder between two braces, or a problem added."""
    name, colon, spec = text.partition(":")
    shown = "{" + text + "}"
    if name.startswith("__") and name.endswith("__") and name not in _PLACEHOLDERS:
        ours = ", ".join(f"{{{each}}}" for each in _PLACEHOLDERS)
        problems.append(_fault(f"{shown} is no placeholder", "", f"use a column's name, or one of {ours}"))
    elif colon and name in (TASK, CONTEXT, LABELS):
        problems.append(_fault(f"{shown} is text, which takes no format", "", f"write {{{name}}}"))
    elif "{" in text or not _NAME.fullmatch(name):
        problems.append(
            Problem(
                what=f"prompt.template: {shown} is not a plain name",
                expected="a column's name in braces, without dots, brackets or conversions",
                fix=_BRACES if not name.strip() or not name[0].isalnum() else "",
            )
        )
    elif (colon and not spec) or not _FORMAT_SPEC.fullmatch(spec):
        problems.append(
            Problem(
                what=f"prompt.template: '{spec}' in {shown} is no number format",
                expected="a format such as {x:.2f}",
                fix=_BRACES,
            )
        )
    else:
        return [Placeholder(name=name, format_spec=spec)]
    return []


def _formatted(placeholder: Placeholder, value: Any) -> str:
    if not placeholder.format_spec:
        return str(value)
    try:
        return format(value, placeholder.format_spec)
    except (TypeError, ValueError):
        raise DataError(
            Problem(
                what=f"column {placeholder.name} holds {str(value)[:40]!r}, which the format "
                f"{{{placeholder.name}:{placeholder.format_spec}}} of prompt.template does not fit",
                expected="a number",
            )
        ) from None


def _fault(what: str, near: str, fix: str) -> Problem:
    place = f" near {near!r}" if near else ""
    return Problem(what=f"prompt.template: {what}{place}", fix=fix)
