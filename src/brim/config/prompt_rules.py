"""Check the keys of `prompt` and of a category against each other.

A template must name what is set, and retrieval needs its keys. A category's rules concern its labels, how they are
found, and the fallback label.
"""

from __future__ import annotations

from collections.abc import Iterator

from brim.config.findings import Finding
from brim.config.prompts import CONTEXT, LABELS, SAMPLE, TASK, LabelReader, Template, is_plain_name, pattern_fault
from brim.config.schema import Config, FinetuneTrainer, GenerationConfig, OutputFeature
from brim.config.text import KeyPath, dotted
from brim.errors import ConfigError

OUTPUT: KeyPath = ("output_features", 0)


DECODER: KeyPath = (*OUTPUT, "decoder")


MATCH: KeyPath = (*DECODER, "match")


VOCAB: KeyPath = (*OUTPUT, "preprocessing", "vocab")


FALLBACK: KeyPath = (*OUTPUT, "preprocessing", "fallback_label")


# Keys of `generation` that forbid or force tokens, and could leave no label possible.
_AT_ODDS = (
    "min_new_tokens",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "prompt_lookup_num_tokens",
)


def category_rules(config: Config) -> Iterator[Finding]:
    """Find what is wrong with a category."""
    if config.chat is not None:
        return
    feature = config.output_features[0]
    faults = [*_types_agree(feature)]
    if feature.type == "category":
        faults += [*_fallback_is_given(feature), *_labels_are_told_apart(feature), *_expressions_are_fine(feature)]
        if not faults:
            faults += _own_texts_are_read(config, feature)
        faults += _nothing_forbids_a_label(config, feature)
    yield from faults


def unreachable(feature: OutputFeature) -> list[tuple[str, str]]:
    """Return labels whose rule never decides, each with the first label whose rule fits whenever it does."""
    labels = list(feature.rules)
    found, same, contained, lengths = [], dict[tuple[str, str], int](), dict[str, int](), set[int]()
    for number, (label, rule) in enumerate(feature.rules.items()):
        earlier = [same[rule.type, rule.value]] if (rule.type, rule.value) in same else []
        if rule.type == "contains":
            text = rule.value.lower()
            earlier += [contained[part] for part in _parts(text, lengths) if part in contained]
            contained.setdefault(text, number)
            lengths.add(len(text))
        if earlier:
            found.append((label, labels[min(earlier)]))
        same.setdefault((rule.type, rule.value), number)
    return found


def _parts(text: str, lengths: set[int]) -> Iterator[str]:
    """Give the parts of a text that have one of these lengths."""
    for length in lengths:
        for start in range(len(text) - length + 1):
            yield text[start : start + length]


def _types_agree(feature: OutputFeature) -> Iterator[Finding]:
    if (feature.type == "category") != (feature.categories is not None):
        yield Finding(
            paths=((*DECODER, "type"), DECODER, (*OUTPUT, "type")),
            what=f"output_features.0.decoder.type is {feature.decoder.type}, and the feature's type {feature.type}",
            expected="text with text_extractor, or category with category_extractor",
            fix=f"set {dotted((*OUTPUT, 'type'))}: category" if feature.type == "text" else "give decoder.match",
        )
    for name in ("fallback_label", "vocab"):
        if feature.type == "text" and getattr(feature.preprocessing, name) is not None:
            path: KeyPath = (*OUTPUT, "preprocessing", name)
            yield Finding(
                paths=(path,),
                what=f"{dotted(path)} has no effect on a text",
                fix="set output_features.0.type: category, or remove it",
            )


def _fallback_is_given(feature: OutputFeature) -> Iterator[Finding]:
    own, decoder = feature.preprocessing.fallback_label, feature.categories
    of_decoder = None if decoder is None else decoder.fallback_label
    labels = feature.preprocessing.vocab or tuple(feature.rules)
    if labels and own is None and of_decoder is None:
        yield Finding(
            paths=(FALLBACK,),
            what=f"{dotted(FALLBACK)} is missing",
            expected="the label of an answer in which no rule finds one",
            fix=f"add it, such as fallback_label: {labels[0]}",
        )
    if own is not None and of_decoder is not None and own != of_decoder:
        yield Finding(
            paths=((*DECODER, "fallback_label"), FALLBACK),
            what=f"two fallback labels: '{own}' in preprocessing and '{of_decoder}' in decoder",
            fix="keep that in preprocessing",
        )


def _labels_are_told_apart(feature: OutputFeature) -> Iterator[Finding]:
    match, vocab = feature.rules, feature.preprocessing.vocab
    for label in feature.labels:
        if label != label.strip() or not label:
            yield Finding(
                paths=(((*MATCH, label) if label in match else VOCAB), MATCH),
                what=f"the label {label!r} begins or ends with white space, or is empty",
                expected="labels as they stand in the data, white space around them aside",
            )
    if vocab is not None:
        for label in match:
            if label not in vocab:
                yield Finding(
                    paths=((*MATCH, label), VOCAB),
                    what=f"the label {label!r} has a rule and does not stand in {dotted(VOCAB)}",
                    expected=", ".join(vocab),
                    fix="add it there, or remove the rule",
                )
    if match and len(feature.labels) < 2:
        yield Finding(
            paths=(MATCH,),
            what=f"{feature.labels[0]!r} is the only label",
            expected="at least two, of which the fallback may be one",
        )


def _expressions_are_fine(feature: OutputFeature) -> Iterator[Finding]:
    for label, rule in feature.rules.items():
        fault = pattern_fault(rule.value) if rule.type == "regex" else None
        if fault is not None:
            path: KeyPath = (*MATCH, label, "value")
            yield Finding(
                paths=(path,),
                what=f"{dotted(path)} is refused as a regular expression: {fault}",
                expected="an expression such as \\bpositive\\b; it is looked for anywhere in the text",
                fix="simplify it, or use type: contains",
            )


def _own_texts_are_read(config: Config, feature: OutputFeature) -> Iterator[Finding]:
    """Check that each label's text is read as that label, if the model learns to write it or may write nothing else."""
    decoder, is_trained = feature.categories, isinstance(config.trainer, FinetuneTrainer)
    if decoder is None or not feature.rules or not (is_trained or decoder.constrain_to_vocabulary):
        return
    why = "decoder.constrain_to_vocabulary lets it write" if decoder.constrain_to_vocabulary else "it learns to write"
    reader = LabelReader(feature)
    for label in reader.labels:
        read = reader.read(label).label
        if read != label:
            yield Finding(
                paths=((*MATCH, label), MATCH),
                what=f"the model's text {label!r}, which {why}, would be read as the label {read!r}",
                expected="rules that find each label in its own text",
                fix="correct the rules, and put that of a label first whose text contains another label's",
            )


def _nothing_forbids_a_label(config: Config, feature: OutputFeature) -> Iterator[Finding]:
    decoder, untouched = feature.categories, GenerationConfig()
    if decoder is None or not decoder.constrain_to_vocabulary:
        return
    for name in _AT_ODDS:
        value = getattr(config.generation, name)
        if value and value != getattr(untouched, name):
            yield Finding(
                paths=(("generation", name), (*DECODER, "constrain_to_vocabulary")),
                what=f"generation.{name} and decoder.constrain_to_vocabulary both say which tokens may be written",
                fix=f"remove generation.{name}",
            )


TEMPLATE: KeyPath = ("prompt", "template")


TASK_KEY: KeyPath = ("prompt", "task")


RETRIEVAL: KeyPath = ("prompt", "retrieval")


INPUTS: KeyPath = ("input_features",)


def template_is_whole(config: Config) -> Iterator[Finding]:
    """Check that the template can be read and has a placeholder for each thing that is set, and for nothing else."""
    prompt = config.prompt
    if prompt.template is None:
        return
    try:
        used = Template.parse(prompt.template).names
    except ConfigError as error:
        for problem in error.problems:
            yield Finding(paths=(TEMPLATE,), what=problem.what, expected=problem.expected, fix=problem.fix)
        return
    answer = config.output_features[0].column_name
    if answer in used:
        yield Finding(
            paths=(TEMPLATE, (*OUTPUT, "name"), (*OUTPUT, "column")),
            what=f"prompt.template names the output column {answer}: the prompt would give the answer away",
            fix=f"take {{{answer}}} out of the template",
        )
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
                what=f"{dotted(path)} is set, and prompt.template does not say where it goes",
                expected=f"{{{placeholder}}} in the template",
                fix=f"put {{{placeholder}}} into the template, or remove {dotted(path)}",
            )
        elif placeholder in used and not is_set:
            yield Finding(
                paths=(TEMPLATE, path),
                what=f"prompt.template has {{{placeholder}}}, and {dotted(path)} is not set",
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
    """Check that several inputs can stand in a template, and that none has a length, which would cut the prompt."""
    if config.chat is not None or len(config.input_features) == 1:
        return
    for number, feature in enumerate(config.input_features):
        path: KeyPath = (*INPUTS, number)
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
    """Check that retrieval has a template and, if semantic, a model, and that all of its keys have an effect."""
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
