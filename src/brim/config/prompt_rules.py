"""Rules between the keys of `prompt`: what the template must name, and what retrieval needs."""

from __future__ import annotations

from collections.abc import Iterator

from brim.config.findings import Finding
from brim.config.places import Path
from brim.config.schema import Config
from brim.config.template import CONTEXT, LABELS, SAMPLE, TASK, is_plain_name, names, parse_template
from brim.errors import ConfigError

TEMPLATE: Path = ("prompt", "template")
TASK_KEY: Path = ("prompt", "task")
RETRIEVAL: Path = ("prompt", "retrieval")
INPUTS: Path = ("input_features",)


def template_names_what_is_set(config: Config) -> Iterator[Finding]:
    """A task or examples that no placeholder takes would be left out without a word."""
    prompt = config.prompt
    if prompt.template is None:
        return
    try:
        used = names(parse_template(prompt.template))
    except ConfigError:
        return  # told by another rule
    if prompt.num_examples and not set(used) - {TASK, CONTEXT}:
        yield Finding(
            paths=(TEMPLATE, RETRIEVAL),
            what="prompt.retrieval is set, and prompt.template names no column: nothing tells one row from another",
            expected="a column's name in braces, or {__sample__}",
        )
    for placeholder, is_set, path, lacking in (
        (TASK, prompt.task is not None, TASK_KEY, "set prompt.task"),
        (CONTEXT, prompt.num_examples > 0, RETRIEVAL, "set prompt.retrieval, such as {type: random, k: 2}"),
    ):
        if is_set and placeholder not in used:
            yield Finding(
                paths=(TEMPLATE, path),
                what=f"{'.'.join(map(str, path))} is set, and prompt.template does not say where it goes",
                expected=f"{{{placeholder}}} in the template",
                fix=f"put {{{placeholder}}} into the template, or remove {'.'.join(map(str, path))}",
            )
        elif placeholder in used and not is_set:
            yield Finding(
                paths=(TEMPLATE, path),
                what=f"prompt.template has {{{placeholder}}}, and {'.'.join(map(str, path))} is not set",
                fix=f"{lacking}, or take {{{placeholder}}} out of the template",
            )

    if LABELS in used and config.output_features[0].categories is None:
        yield Finding(
            paths=(TEMPLATE, ("output_features", 0, "type")),
            what=f"prompt.template has {{{LABELS}}}, and the output feature is a text, which has none",
            fix=f"set output_features.0.type: category, or take {{{LABELS}}} out of the template",
        )
    if SAMPLE in used and len(config.input_features) > 1:
        yield Finding(
            paths=(TEMPLATE, INPUTS),
            what=f"prompt.template has {{{SAMPLE}}}, and there are several input features",
            expected="the columns by their names",
            fix=f"write {' '.join(f'{{{each.column_name}}}' for each in config.input_features)} in its place",
        )


def several_inputs_are_put_together(config: Config) -> Iterator[Finding]:
    """Without a template, each of several inputs is named in one; a length would be of all of them."""
    if config.chat is not None or len(config.input_features) == 1:
        return
    for number, feature in enumerate(config.input_features):
        path: Path = (*INPUTS, number)
        if config.prompt.template is None and not is_plain_name(feature.column_name):
            yield Finding(
                paths=((*path, "column"), (*path, "name")),
                what=f"the column {feature.column_name!r} cannot stand in a template, and there are several inputs",
                expected="a name without brackets, braces, quotes, backslashes, dots, colons and exclamation marks",
                fix="rename the column in the data",
            )
        if feature.preprocessing.max_sequence_length is not None:
            yield Finding(
                paths=((*path, "preprocessing", "max_sequence_length"),),
                what="max_sequence_length of an input feature cuts the prompt, which is made of several here",
                fix="set preprocessing.global_max_sequence_length, or remove it",
            )


def retrieval_is_whole(config: Config) -> Iterator[Finding]:
    """Retrieval needs a template to stand in and, by likeness, a model; keys without effect are told."""
    prompt, retrieval = config.prompt, config.prompt.retrieval
    if retrieval is None:
        return
    if retrieval.type is None:
        for name in ("k", "model_name", "index_name"):
            if getattr(retrieval, name):
                yield Finding(
                    paths=((*RETRIEVAL, name), (*RETRIEVAL, "type")),
                    what=f"prompt.retrieval.{name} has no effect without prompt.retrieval.type",
                    fix=f"set prompt.retrieval.type to random or semantic, or remove {name}",
                )
        return
    if prompt.template is None and prompt.task is None:
        yield Finding(
            paths=(RETRIEVAL, TASK_KEY, TEMPLATE),
            what="prompt.retrieval is set, and there is neither a prompt.task nor a prompt.template",
            expected="a task (for the built-in template), or a template with {__context__}",
            fix='add prompt.task, such as "Classify the input"',
        )
    if retrieval.type == "semantic" and retrieval.model_name is None:
        yield Finding(
            paths=((*RETRIEVAL, "model_name"), (*RETRIEVAL, "type")),
            what="prompt.retrieval.type is semantic, and there is no model that compares inputs",
            expected="prompt.retrieval.model_name: a sentence-transformers model, as a folder or a Hub id",
            fix="add model_name, or set prompt.retrieval.type: random",
        )
    for name in ("model_name", "index_name"):
        if retrieval.type == "random" and getattr(retrieval, name) is not None:
            yield Finding(
                paths=((*RETRIEVAL, name), (*RETRIEVAL, "type")),
                what=f"prompt.retrieval.{name} has no effect on rows that are drawn by chance",
                fix=f"remove {name}, or set prompt.retrieval.type: semantic",
            )
