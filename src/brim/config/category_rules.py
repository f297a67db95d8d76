"""Rules between the keys of a category: its labels, how they are found, and the fallback label."""

from __future__ import annotations

from collections.abc import Iterator

from brim.config.findings import Finding
from brim.config.labels import LabelReader
from brim.config.pattern import pattern_fault
from brim.config.places import Path, dotted
from brim.config.schema import Config, FinetuneTrainer, GenerationConfig, OutputFeature

OUTPUT: Path = ("output_features", 0)
DECODER: Path = (*OUTPUT, "decoder")
MATCH: Path = (*DECODER, "match")
VOCAB: Path = (*OUTPUT, "preprocessing", "vocab")
FALLBACK: Path = (*OUTPUT, "preprocessing", "fallback_label")

# Of `generation`: what forbids or forces tokens, and could leave no label possible.
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
    """What is wrong with a category."""
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
    """Labels whose rule never decides, each with the label whose rule fits whenever it does."""
    found = []
    rules = list(feature.rules.items())
    for number, (label, rule) in enumerate(rules):
        for earlier, other in rules[:number]:
            same = other == rule
            within = other.type == rule.type == "contains" and other.value.lower() in rule.value.lower()
            if same or within:
                found.append((label, earlier))
                break
    return found


def without_rule(feature: OutputFeature) -> list[str]:
    """Labels of `vocab` that no rule finds, and that are not the fallback either."""
    found = [*feature.rules, feature.fallback_label]
    return [label for label in feature.labels if label not in found]


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
            path: Path = (*OUTPUT, "preprocessing", name)
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
            path: Path = (*MATCH, label, "value")
            yield Finding(
                paths=(path,),
                what=f"{dotted(path)} is refused as a regular expression: {fault}",
                expected="an expression such as \\bpositive\\b; it is looked for anywhere in the text",
                fix="simplify it, or use type: contains",
            )


def _own_texts_are_read(config: Config, feature: OutputFeature) -> Iterator[Finding]:
    """Where the model writes the labels themselves, since it learns them or may write nothing else."""
    decoder = feature.categories
    is_trained = isinstance(config.trainer, FinetuneTrainer)
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
