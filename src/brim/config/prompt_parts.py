"""The template that a prompt section stands for, with task and labels; Ludwig's own where only a task is given."""

from __future__ import annotations

from brim.config.schema import Config, PromptConfig
from brim.config.template import CONTEXT, LABELS, SAMPLE, TASK, Parts, Placeholder, names, parse_template

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
    """The template as it is given, or built in; None where the input feature's value is the prompt."""
    if prompt.template is not None:
        return prompt.template
    if prompt.task is None:
        return None
    return FEW_SHOT if prompt.num_examples else ZERO_SHOT


def template_with_task(config: Config) -> str | None:
    """The template with task and labels written into it, so that it stands for itself."""
    parts = prompt_parts(config)
    return None if parts is None else "".join(map(_written, parts))


def prompt_parts(config: Config) -> Parts | None:
    """The parsed template with task and labels as some of its literal texts, in which braces are braces.

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
    """The columns that the prompt reads, each once, in the template's order."""
    parts, column = prompt_parts(config), config.input_features[0].column_name
    used = (SAMPLE,) if parts is None else tuple(name for name in names(parts) if name != CONTEXT)
    return tuple(dict.fromkeys(column if name == SAMPLE else name for name in used))


def _written(part: str | Placeholder) -> str:
    if isinstance(part, str):
        return part.replace("{", "{{").replace("}", "}}")
    return f"{{{part.name}:{part.format_spec}}}" if part.format_spec else f"{{{part.name}}}"
