"""Parse prompt templates so that they cannot run code.

The grammar is `{column}`, `{column:.2f}`, `{{` and `}}`, and never more than plain names. Python's str.format would
follow `{x.__class__}` into the interpreter; here a name is looked up among the row's values, and nothing else happens.
The template of a prompt section includes its task and labels; it is Ludwig's own where only a task is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from brim.config.schema import Config, PromptConfig
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
