"""What a configuration leaves open and the rest of it says: the template of several inputs, the rules of labels."""

from __future__ import annotations

from brim.config.prompt_parts import SAMPLE_INPUT, template_text
from brim.config.schema import Config, OutputFeature
from brim.config.schema.features import CategoryExtractor, MatchRule
from brim.config.template import is_plain_name


def completed(config: Config) -> Config:
    """The configuration with what follows from it written out; completed again, it is the same."""
    if config.chat is not None:
        return config
    update: dict[str, object] = {}
    template = _joined_template(config)
    if template is not None:
        update["prompt"] = config.prompt.model_copy(update={"template": template})
    feature = config.output_features[0]
    vocab = feature.preprocessing.vocab
    if feature.categories is not None and feature.categories.match is None and vocab and feature.fallback_label:
        update["output_features"] = (with_labels_matched(feature, vocab),)
    return config.model_copy(update=update) if update else config


def with_labels_matched(feature: OutputFeature, labels: tuple[str, ...]) -> OutputFeature:
    """The category with a rule for each label, which finds the label's own text."""
    decoder = feature.categories
    assert isinstance(decoder, CategoryExtractor)
    match = {label: MatchRule(type="contains", value=label) for label in _longer_first(labels)}
    return feature.model_copy(update={"decoder": decoder.model_copy(update={"match": match})})


def _joined_template(config: Config) -> str | None:
    """The template that names each of several inputs; None where it is given, or not to be had."""
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


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _longer_first(labels: tuple[str, ...]) -> list[str]:
    """In their order, but each label behind those that contain it, since the first rule that fits decides."""
    ordered: list[str] = []
    for label in labels:
        longer = [each for each in labels if label.lower() in each.lower() and len(each) > len(label)]
        for each in [*sorted(longer, key=len, reverse=True), label]:
            if each not in ordered:
                ordered.append(each)
    return ordered
