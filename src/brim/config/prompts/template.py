"""Parse prompt templates so that they cannot run code, and read labels in responses by rules that end.

The grammar of a template is `{column}`, `{column:.2f}`, `{{` and `}}`, and never more than plain names. Python's
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from brim.config.schema import Config, MatchRule, OutputFeature, PromptConfig
from brim.errors import ConfigError, DataError, Problem

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


def prompt_template(config: Config) -> Template | None:
    """Return the template with task and labels among its literal texts; None if the input's value is the prompt.

    Raises ConfigError as `Template.parse`.
    """
    text = template_text(config.prompt)
    if text is None:
        return None
    same = {TASK: config.prompt.task or "", LABELS: ", ".join(config.output_features[0].labels)}  # in every row
    parts = Template.parse(text).parts
    return Template(tuple(same.get(each.name, each) if isinstance(each, Placeholder) else each for each in parts))


def joined_template(config: Config) -> str | None:
    """Return a template with a line for each of several inputs; None if one is given or none can be made."""
    inputs, prompt = config.input_features, config.prompt
    if len(inputs) == 1 or prompt.template is not None or not all(is_plain_name(each.column_name) for each in inputs):
        return None
    if prompt.num_examples and prompt.task is None:
        return None
    lines = "\n".join(f"{_literal(each.name)}: {{{each.column_name}}}" for each in inputs)
    around = template_text(prompt)
    if around is None:
        return f"{lines}\n{_literal(config.output_features[0].name)}:\n"
    return around.replace(SAMPLE_INPUT, f"SAMPLE INPUT:\n{lines}")


def prompt_columns(config: Config) -> tuple[str, ...]:
    """Return the columns that the prompt reads, each once, in the template's order."""
    template, column = prompt_template(config), config.input_features[0].column_name
    used = (SAMPLE,) if template is None else tuple(name for name in template.names if name != CONTEXT)
    return tuple(dict.fromkeys(column if name == SAMPLE else name for name in used))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """Hold `{name}` or `{name:format_spec}`."""

    name: str
    format_spec: str = ""

    def __str__(self) -> str:
        return f"{{{self.name}:{self.format_spec}}}" if self.format_spec else f"{{{self.name}}}"


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


SAMPLE = "__sample__"  # the input feature's value


TASK = "__task__"  # prompt.task


CONTEXT = "__context__"  # the retrieved rows


LABELS = "__labels__"  # those of the category that is asked for


_PLACEHOLDERS = (SAMPLE, TASK, CONTEXT, LABELS)


_NAME = re.compile(r"[^\s{}\[\].!:'\"\\](?:[^{}\[\].!:'\"\\\n\t\r]*[^\s{}\[\].!:'\"\\]\.?)?")


# fill and align, sign, #, 0, width, grouping, precision, type; widths of at most three digits, so that no text explodes
_FORMAT_SPEC = re.compile(r"(?:[^{}]?[<>=^])?[+\- ]?#?0?\d{0,3}[,_]?(?:\.\d{1,2})?[bcdeEfFgGosxX%]?")


_PIECES = re.compile(r"\{\{|\}\}|\{(?P<inside>[^}]*)\}|[{}]|[^{}]+")


@dataclass(frozen=True, slots=True)
class Template:
    """Hold literal texts and placeholders in turn. As text, placeholders have braces, literal braces are doubled."""

    parts: tuple[str | Placeholder, ...]

    @classmethod
    def parse(cls, template: str) -> Template:
        """Parse a template into literal texts and placeholders. Raises ConfigError with every fault of the template."""
        parts: list[str | Placeholder] = []
        literal: list[str] = []
        problems: list[Problem] = []
        for found in _PIECES.finditer(template):
            piece, inside = found[0], found["inside"]
            if inside is not None:
                parts += ["".join(literal)] if literal else []
                literal = []
                parts += _placeholder(inside, problems)
            elif piece == "{":
                problems.append(_fault("a { is never closed", _BRACES, template[found.start() : found.start() + 20]))
                break
            elif piece == "}":
                near = template[max(0, found.start() - 20) : found.end()]
                problems.append(_fault("a } closes nothing", _BRACES, near))
            else:
                literal.append(piece[0] if piece in ("{{", "}}") else piece)
        ConfigError.raise_for(problems)
        return cls((*parts, "".join(literal)) if literal else tuple(parts))

    def __str__(self) -> str:
        return "".join(_literal(part) if isinstance(part, str) else str(part) for part in self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that the template uses, each once, in order."""
        return tuple(dict.fromkeys(part.name for part in self.parts if isinstance(part, Placeholder)))

    def render(self, values: Mapping[str, Any]) -> str:
        """Render the text for one row. Raises DataError when a value does not fit its number format."""
        return "".join(part if isinstance(part, str) else _formatted(part, values[part.name]) for part in self.parts)


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
        problems.append(_fault(f"{shown} is not a placeholder", f"use a column's name, or one of {ours}"))
    elif colon and name in (TASK, CONTEXT, LABELS):
        problems.append(_fault(f"{shown} is text, which takes no format", f"write {{{name}}}"))
    elif "{" in text or not _NAME.fullmatch(name):
        fix = _BRACES if not name.strip() or not name[0].isalnum() else ""
        expected = "a column's name in braces, without dots, brackets or conversions"
        problems.append(_fault(f"{shown} is not a plain name", fix, expected=expected))
    elif (colon and not spec) or not _FORMAT_SPEC.fullmatch(spec):
        expected = "a format such as {x:.2f}"
        problems.append(_fault(f"'{spec}' in {shown} is not a number format", _BRACES, expected=expected))
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


def _fault(what: str, fix: str, near: str = "", *, expected: str = "") -> Problem:
    place = f" near {near!r}" if near else ""
    return Problem(what=f"prompt.template: {what}{place}", expected=expected, fix=fix)


# Steps of a regular expression on one text: some tenths of a second in Python's engine, in the worst case.
MAX_STEPS = 10_000_000


Fits: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Hold the label that was found in a text."""

    label: str
    is_fallback: bool = False  # no rule fits
    is_partial: bool = False  # a regular expression saw only the beginning of the text, and no rule before it fits


class LabelReader:
    """Find a category's label in the model's text: that of the first rule that fits, else the fallback label.

    As in Ludwig, upper and lower case count as equal, here also in the rules. A regular expression sees only the
    beginning of a text that is so long that matching could take for ever.
    """

    def __init__(self, feature: OutputFeature) -> None:
        """Prepare the rules of a category that has passed the configuration's checks."""
        fallback = feature.fallback_label
        assert feature.rules, "a text has no labels, and those of a category are known by now"
        assert fallback is not None, "checked with the configuration"
        self.labels, self.fallback = feature.labels, fallback
        self._rules = [(label, _fits(rule), _num_characters(rule)) for label, rule in feature.rules.items()]

    def read(self, text: str) -> Reading:
        """Return the label, and how it was found."""
        is_partial = False
        for label, fits, num_characters in self._rules:
            is_partial |= num_characters is not None and len(text) > num_characters
            if fits(text if num_characters is None else text[:num_characters]):
                return Reading(label=label, is_partial=is_partial)
        return Reading(label=self.fallback, is_fallback=True, is_partial=is_partial)


def _fits(rule: MatchRule) -> Fits:
    if rule.type == "contains":
        value = rule.value.lower()
        return lambda text: value in text.lower()
    expression = re.compile(rule.value, re.IGNORECASE)
    return lambda text: expression.search(text) is not None


def _num_characters(rule: MatchRule) -> int | None:
    """Return how many characters of a text a rule looks at; None for all."""
    return None if rule.type == "contains" else characters_within(rule.value, MAX_STEPS)


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
        cost = _cost_of(pattern)
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
    cost = _cost_of(pattern)
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


def _cost_of(pattern: str) -> _Cost:
    """Return the cost of an expression, by Python's own parser, which has no public name."""
    try:
        from re import _parser as parser  # type: ignore[attr-defined, unused-ignore]
    except ImportError:  # Python 3.10
        import sre_parse as parser  # type: ignore[no-redef, unused-ignore]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of syntax that will mean something else one day
        return _sequence(parser.parse(pattern))


def _sequence(parsed: Iterable[Any]) -> _Cost:
    whole = _Cost()
    for operator, argument in parsed:
        part = _part(str(operator), argument)
        whole = _Cost(
            opens=whole.opens + part.opens, ways=min(whole.ways * part.ways, 10**18), nested=whole.nested or part.nested
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
