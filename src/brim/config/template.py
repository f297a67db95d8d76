"""Parse prompt templates and regular expressions so that neither can run code or run for ever.

The grammar of templates is `{column}`, `{column:.2f}`, `{{` and `}}`, and never more than plain names. Python's
str.format would follow `{x.__class__}` into the interpreter; here a name is looked up among the row's values, and
nothing else happens. The template of a prompt section includes its task and labels; it is Ludwig's own where only a
task is given.

Regular expressions come from configurations and adapters, and only those that cannot run for ever are accepted.
Python's engine tries every way to divide a text among repeats and alternatives; where these stand inside a repeat, as
in `(a+)+$`, their number grows exponentially with the text.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from brim.config.schema import Config, PromptConfig
from brim.errors import ConfigError, DataError, Problem

MAX_CHARACTERS = 2_000


MAX_OPEN_REPEATS = 4  # one after the other: the time grows with the text's length to this power


MAX_WAYS = 10_000  # of choosing alternatives and optional parts


_FEW = 16  # times; a repeat of more counts as open


_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def pattern_fault(pattern: str) -> str | None:
    """Say why a regular expression is refused; None if it is accepted."""
    if len(pattern) > MAX_CHARACTERS:
        return f"it has {len(pattern):,} characters, more than {MAX_CHARACTERS:,}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that will mean something else one day
            cost = _sequence(_parser().parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is not a regular expression: {error}"
    if cost.nested:
        return "a repeat or a choice stands inside a repeat, which can take for ever"
    if cost.opens > MAX_OPEN_REPEATS:
        return f"{cost.opens} open repeats follow each other, which can take for ever; {MAX_OPEN_REPEATS} may"
    if cost.ways > MAX_WAYS:
        return f"it has {min(cost.ways, 10**12):,} ways to match, more than {MAX_WAYS:,}"
    return None


def characters_within(pattern: str, num_steps: int) -> int:
    """Return the characters of the longest text in which a search for the expression takes about so many steps.

    pattern: one without a fault. With k open repeats one after the other, a text of n characters can be divided among
    them and what stands before in n^(k+1) / (k+1)! ways.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = _sequence(_parser().parse(pattern))
    parts = cost.opens + 1
    return max(1, int((num_steps * math.factorial(parts) / cost.ways) ** (1 / parts)))


@dataclass(frozen=True, slots=True)
class _Cost:
    """Count an expression's open repeats and choices that can follow each other; nested: an open repeat holds any."""

    opens: int = 0
    ways: int = 1
    nested: bool = False

    @property
    def varies(self) -> bool:
        return self.opens > 0 or self.ways > 1


def _parser() -> Any:
    """Return Python's own parser, which has no public name."""
    try:
        from re import _parser as parser  # type: ignore[attr-defined, unused-ignore]
    except ImportError:  # Python 3.10
        import sre_parse as parser  # type: ignore[no-redef, unused-ignore]
    return parser


def _sequence(parsed: Iterable[Any]) -> _Cost:
    whole = _Cost()
    for operator, argument in parsed:
        part = _part(str(operator), argument)
        whole = _Cost(
            opens=whole.opens + part.opens,
            ways=min(whole.ways * part.ways, 10**18),
            nested=whole.nested or part.nested,
        )
    return whole


def _part(name: str, argument: Any) -> _Cost:
    if name in _REPEATS:
        least, most, inner = argument
        cost, times = _sequence(inner), int(most)
        if times > _FEW:
            return _Cost(opens=1, nested=cost.nested or cost.varies)
        return _Cost(
            opens=cost.opens * times,
            ways=min(cost.ways ** max(1, times) * (times - int(least) + 1), 10**18),
            nested=cost.nested or (times > 1 and cost.opens > 0),
        )
    if name == "BRANCH":
        ways = [_sequence(way) for way in argument[1]]
        return _Cost(
            opens=max(way.opens for way in ways),
            ways=sum(way.ways for way in ways),
            nested=any(way.nested for way in ways),
        )
    return _sequence(item for inner in _parts_of(argument) for item in inner)


def _parts_of(argument: Any) -> list[Any]:
    """Return the expressions inside a group, an assertion or a condition."""
    held = argument if isinstance(argument, tuple) else (argument,)
    return [part for part in held if type(part).__name__ == "SubPattern"]


# Ludwig's wording to the letter: a model reads every word of a prompt.
SAMPLE_INPUT = "SAMPLE INPUT: {__sample__}"


ZERO_SHOT = f"""{SAMPLE_INPUT}

USER: Complete the following task: {{__task__}}

ASSISTANT:
"""


FEW_SHOT = f"""Below is relevant context:

CONTEXT: {{__context__}}

CONTEXT is comprised of labeled samples whose embeddings were similar to that of the sample input. The labels in
these samples could aid you in your final prediction. Given this and no prior knowledge, follow the instructions
below.

{SAMPLE_INPUT}

USER: Complete the following task: {{__task__}}

ASSISTANT:
"""


def template_text(prompt: PromptConfig) -> str | None:
    """Return the template that is given, or a built-in one; None if the input feature's value is the prompt."""
    if prompt.template is not None:
        return prompt.template
    if prompt.task is None:
        return None
    return FEW_SHOT if prompt.num_examples else ZERO_SHOT


def template_with_task(config: Config) -> str | None:
    """Return the template with task and labels written into it, so that it needs nothing else."""
    parts = prompt_parts(config)
    return None if parts is None else "".join(map(_written, parts))


def prompt_parts(config: Config) -> Parts | None:
    """Return the parsed template with task and labels among its literal texts, in which braces are braces.

    Raises ConfigError as `parse_template`.
    """
    template = template_text(config.prompt)
    if template is None:
        return None
    same = {TASK: config.prompt.task or "", LABELS: ", ".join(config.output_features[0].labels)}  # in every row
    return tuple(
        same.get(part.name, part) if isinstance(part, Placeholder) else part for part in parse_template(template)
    )


def prompt_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that the prompt reads, each once, in the template's order."""
    parts, column = prompt_parts(config), config.input_features[0].column_name
    used = (SAMPLE,) if parts is None else tuple(name for name in names(parts) if name != CONTEXT)
    return tuple(dict.fromkeys(column if name == SAMPLE else name for name in used))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """Hold `{name}` or `{name:format_spec}`."""

    name: str
    format_spec: str = ""


def _written(part: str | Placeholder) -> str:
    if isinstance(part, str):
        return part.replace("{", "{{").replace("}", "}}")
    return f"{{{part.name}:{part.format_spec}}}" if part.format_spec else f"{{{part.name}}}"


SAMPLE = "__sample__"  # the input feature's value


TASK = "__task__"  # prompt.task


CONTEXT = "__context__"  # the retrieved rows


LABELS = "__labels__"  # those of the category that is asked for


_PLACEHOLDERS = (SAMPLE, TASK, CONTEXT, LABELS)


_NAME = re.compile(r"[^\s{}\[\].!:'\"\\](?:[^{}\[\].!:'\"\\\n\t\r]*[^\s{}\[\].!:'\"\\]\.?)?")


# fill and align, sign, #, 0, width, grouping, precision, type; widths of at most three digits, so that no text explodes
_FORMAT_SPEC = re.compile(r"(?:[^{}]?[<>=^])?[+\- ]?#?0?\d{0,3}[,_]?(?:\.\d{1,2})?[bcdeEfFgGosxX%]?")


Parts: TypeAlias = tuple[str | Placeholder, ...]


def parse_template(template: str) -> Parts:
    """Parse a template into literal texts and placeholders. Raises ConfigError with every fault of the template."""
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
    """Render the text for one row. Raises DataError when a value does not fit its number format."""
    return "".join(part if isinstance(part, str) else _formatted(part, values[part.name]) for part in parts)


def names(parts: Parts) -> tuple[str, ...]:
    """Return the names that the template uses, each once, in order."""
    return tuple(dict.fromkeys(part.name for part in parts if isinstance(part, Placeholder)))


def is_plain_name(name: str) -> bool:
    """Return whether a column's name may stand in braces."""
    return _NAME.fullmatch(name) is not None


_BRACES = "write {{ and }} for literal braces"


def _placeholder(text: str, problems: list[Problem]) -> Iterable[Placeholder]:
    """Return the placeholder between two braces, or add a problem."""
    name, colon, spec = text.partition(":")
    shown = "{" + text + "}"
    if name.startswith("__") and name.endswith("__") and name not in _PLACEHOLDERS:
        ours = ", ".join(f"{{{each}}}" for each in _PLACEHOLDERS)
        problems.append(_fault(f"{shown} is not a placeholder", "", f"use a column's name, or one of {ours}"))
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
                what=f"prompt.template: '{spec}' in {shown} is not a number format",
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
            what=f"column {placeholder.name} holds {str(value)[:40]!r}, which the format "
            f"{{{placeholder.name}:{placeholder.format_spec}}} of prompt.template does not fit",
            expected="a number",
        ) from None


def _fault(what: str, near: str, fix: str) -> Problem:
    place = f" near {near!r}" if near else ""
    return Problem(what=f"prompt.template: {what}{place}", fix=fix)
