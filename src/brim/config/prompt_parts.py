"""The template that a prompt section stands for, with the task in it; Ludwig's own where only a task is given."""

from __future__ import annotations

from brim.config.schema import Config, PromptConfig
from brim.config.template import CONTEXT, SAMPLE, TASK, Parts, Placeholder, names, parse_template

# Ludwig's wording to the letter: a model reads every word of a prompt.
ZERO_SHOT = """SAMPLE INPUT: {__sample__}

USER: Complete the following task: {__task__}

ASSISTANT:
"""
FEW_SHOT = """Below is relevant context:

CONTEXT: {__context__}

CONTEXT is comprised of labeled samples whose embeddings were similar to that of the sample input. The labels in
these samples could aid you in your final prediction. Given this and no prior knowledge, follow the instructions
below.

SAMPLE INPUT: {__sample__}

USER: Complete the following task: {__task__}

ASSISTANT:
"""


def template_text(prompt: PromptConfig) -> str | None:
    """The template as it is given, or built in; None where the input feature's value is the prompt."""
    if prompt.template is not None:
        return prompt.template
    if prompt.task is None:
        return None
    return FEW_SHOT if prompt.num_examples else ZERO_SHOT


def template_with_task(prompt: PromptConfig) -> str | None:
    """The template with the task written into it, so that it stands for itself."""
    parts = prompt_parts(prompt)
    return None if parts is None else "".join(map(_written, parts))


def prompt_parts(prompt: PromptConfig) -> Parts | None:
    """The parsed template with the task as one of its literal texts, in which braces are braces.

    Raises ConfigError as `parse_template`.
    """
    template = template_text(prompt)
    if template is None:
        return None
    return tuple(
        prompt.task or "" if isinstance(part, Placeholder) and part.name == TASK else part
        for part in parse_template(template)
    )


def prompt_columns(config: Config) -> tuple[str, ...]:
    """The columns that the prompt reads, each once, in the template's order."""
    parts, column = prompt_parts(config.prompt), config.input_features[0].column_name
    used = (SAMPLE,) if parts is None else tuple(name for name in names(parts) if name != CONTEXT)
    return tuple(dict.fromkeys(column if name == SAMPLE else name for name in used))


def _written(part: str | Placeholder) -> str:
    if isinstance(part, str):
        return part.replace("{", "{{").replace("}", "}}")
    return f"{{{part.name}:{part.format_spec}}}" if part.format_spec else f"{{{part.name}}}"
