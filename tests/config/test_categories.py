"""Categories: which configurations describe one, and what is said to those that do not."""

from __future__ import annotations

import pytest

from brim.config import dump, load_config

MATCH = {
    "positive": {"type": "contains", "value": "positive"},
    "neutral": {"type": "regex", "value": r"\bneutral\b"},
    "negative": {"type": "contains", "value": "negative"},
}
DECODER = {"type": "category_extractor", "match": MATCH}


@pytest.fixture
def category(minimal):
    """A configuration with a category, with keys of the feature added or replaced."""

    def build(decoder=DECODER, preprocessing=None, **keys):
        feature = {
            "name": "answer",
            "type": "category",
            "preprocessing": {"fallback_label": "neutral"} if preprocessing is None else preprocessing,
            "decoder": decoder,
        }
        return minimal(output_features=[feature], **keys)

    return build


def _feature(source):
    return load_config(source).config.output_features[0]


def test_labels_are_those_of_the_rules_in_their_order(category):
    assert _feature(category()).labels == ("positive", "neutral", "negative")
    assert _feature(category(preprocessing={"fallback_label": "none of them"})).labels == (*MATCH, "none of them")
    listed = category(preprocessing={"fallback_label": "neutral", "vocab": ["negative", "neutral", "positive", "x"]})
    assert _feature(listed).labels == ("negative", "neutral", "positive", "x")


def test_the_labels_of_vocab_need_no_rules(category):
    vocab = {"preprocessing": {"fallback_label": "other", "vocab": ["red", "very red", "light red", "other"]}}
    feature = _feature(category(decoder={}, **vocab))
    assert feature.labels == ("red", "very red", "light red", "other")
    assert [(label, rule.type, rule.value) for label, rule in feature.rules.items()] == [
        (label, "contains", label) for label in ("light red", "very red", "red", "other")
    ]


def test_the_labels_of_a_category_may_wait_for_the_data(category):
    feature = _feature(category(decoder={}, preprocessing={}))
    assert (feature.labels, dict(feature.rules)) == ((), {})
    assert _feature(category(decoder={}, preprocessing={"fallback_label": "other"})).labels == ()


def test_a_text_has_no_labels(minimal):
    feature = _feature(minimal())
    assert (feature.labels, feature.categories, feature.fallback_label) == ((), None, None)


def test_the_fallback_may_stand_in_the_decoder(category):
    assert _feature(category(preprocessing={}, decoder={**DECODER, "fallback_label": "neutral"})).fallback_label == (
        "neutral"
    )


def test_the_decoder_of_a_category_need_not_say_its_type(category):
    assert _feature(category(decoder={"match": MATCH})) == _feature(category())


def test_a_dumped_category_loads_back(category):
    source = category(decoder={**DECODER, "constrain_to_vocabulary": True})
    config = load_config(source).config
    assert load_config(config.model_dump()).config == config
    assert list(config.model_dump()["output_features"][0]["decoder"]["match"]) == list(MATCH)
    assert "constrain_to_vocabulary: true" in dump(config)


def test_labels_of_a_file_keep_their_places(file, problems):
    text = """\
base_model: m
output_features:
  - name: label
    type: category
    preprocessing: {fallback_label: "1"}
    decoder:
      match:
        1: {type: contains, value: one}
        yes: {type: contians, value: yes}
        2: {type: regex, value: "two("}
        3: word
        4: {type: json_schema, value: "4"}
"""
    assert problems(file(text)) == [
        "config.yaml:9: output_features.0.decoder.match.yes.type is 'contians'\n  expected: contains or regex\n"
        "  fix: did you mean contains?",
        "config.yaml:10: output_features.0.decoder.match.2.value is refused as a regular expression: it is no regular "
        "expression: missing ), unterminated subpattern at position 3\n"
        "  expected: an expression such as \\bpositive\\b; it is looked for anywhere in the text\n"
        "  fix: simplify it, or use type: contains",
        "config.yaml:11: output_features.0.decoder.match.3 is 'word'\n  expected: a mapping",
        "config.yaml:12: output_features.0.decoder.match.4.type: json_schema is not supported yet\n"
        "  expected: contains or regex",
    ]


FALLBACK = "output_features.0.preprocessing.fallback_label"
REFUSED = {
    "no fallback": (
        {"preprocessing": {}},
        f"{FALLBACK}: {FALLBACK} is missing\n  expected: the label of an answer in which no rule finds one\n"
        "  fix: add it, such as fallback_label: positive",
    ),
    "two fallbacks": (
        {"decoder": {**DECODER, "fallback_label": "negative"}},
        "output_features.0.decoder.fallback_label: two fallback labels: 'neutral' in preprocessing and 'negative' in "
        "decoder\n  fix: keep that in preprocessing",
    ),
    "no rules": (
        {"decoder": {"match": {}}},
        "output_features.0.decoder.match: output_features.0.decoder.match is an empty mapping\n"
        "  expected: a mapping of labels to rules, such as {positive: {type: contains, value: positive}}, "
        "or null",
    ),
    "no decoder for categories": (
        {"decoder": "text_extractor"},
        "output_features.0.decoder: output_features.0.decoder.type is text_extractor, and the feature's type category\n"
        "  expected: text with text_extractor, or category with category_extractor\n  fix: give decoder.match",
    ),
    "one label": (
        {"decoder": {"match": {"neutral": MATCH["neutral"]}}},
        "output_features.0.decoder.match: 'neutral' is the only label\n"
        "  expected: at least two, of which the fallback may be one",
    ),
    "white space": (
        {"decoder": {"match": {**MATCH, " mixed": {"type": "contains", "value": "mixed"}}}},
        "output_features.0.decoder.match. mixed: the label ' mixed' begins or ends with white space, or is empty\n"
        "  expected: labels as they stand in the data, white space around them aside",
    ),
    "a rule for a label that is none": (
        {"preprocessing": {"fallback_label": "neutral", "vocab": ["positive", "neutral"]}},
        "output_features.0.decoder.match.negative: the label 'negative' has a rule and does not stand in "
        "output_features.0.preprocessing.vocab\n  expected: positive, neutral\n  fix: add it there, or remove the rule",
    ),
    "an expression that may take for ever": (
        {"decoder": {"match": {**MATCH, "negative": {"type": "regex", "value": "(no+)+$"}}}},
        "output_features.0.decoder.match.negative.value: output_features.0.decoder.match.negative.value is refused as "
        "a regular expression: a repeat or a choice stands inside a repeat, which can take for ever\n"
        "  expected: an expression such as \\bpositive\\b; it is looked for anywhere in the text\n"
        "  fix: simplify it, or use type: contains",
    ),
    "tokens that must be written": (
        {"decoder": {**DECODER, "constrain_to_vocabulary": True}, "generation": {"min_new_tokens": 2}},
        "generation.min_new_tokens: generation.min_new_tokens and decoder.constrain_to_vocabulary both say which "
        "tokens may be written\n  fix: remove generation.min_new_tokens",
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(category, problems, keys, message):
    assert problems(category(**keys)) == [message]


def test_keys_of_a_category_have_no_place_with_a_text(minimal, problems):
    text = {"name": "answer", "type": "text"}
    assert problems(minimal(output_features=[{**text, "preprocessing": {"fallback_label": "x"}}])) == [
        f"{FALLBACK}: {FALLBACK} has no effect on a text\n  fix: set output_features.0.type: category, or remove it"
    ]
    assert problems(minimal(output_features=[{**text, "decoder": DECODER}])) == [
        "output_features.0.decoder.type: output_features.0.decoder.type is category_extractor, and the feature's type "
        "text\n  expected: text with text_extractor, or category with category_extractor\n"
        "  fix: set output_features.0.type: category"
    ]


SWAPPED = {"bad": {"type": "contains", "value": "poor"}, "very bad": {"type": "contains", "value": "very bad"}}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"decoder": {"match": SWAPPED, "constrain_to_vocabulary": True}}, "decoder.constrain_to_vocabulary lets it"),
        ({"decoder": {"match": SWAPPED}, "trainer": {"type": "finetune"}}, "it learns to"),
    ],
)
def test_labels_that_the_model_writes_must_be_read_as_themselves(category, problems, keys, why):
    assert problems(category(preprocessing={"fallback_label": "very bad"}, **keys)) == [
        f"output_features.0.decoder.match.bad: the model's text 'bad', which {why} write, would be read as the label "
        "'very bad'\n  expected: rules that find each label in its own text\n"
        "  fix: correct the rules, and put that of a label first whose text contains another label's"
    ]
    load_config(category(decoder={"match": SWAPPED}, preprocessing={"fallback_label": "very bad"}))


def test_a_label_without_a_rule_is_noted(category):
    source = category(preprocessing={"fallback_label": "none", "vocab": [*MATCH, "mixed"]})
    assert load_config(source).notes == (
        "output_features.0.preprocessing.vocab: the label 'mixed' is never found, since it has no rule",
    )


def test_a_rule_that_never_decides_is_noted(category):
    match = {
        "good": {"type": "contains", "value": "Good"},
        "very good": {"type": "contains", "value": "very good"},
        "bad": {"type": "regex", "value": "bad"},
        "neutral": {"type": "regex", "value": "bad"},
    }
    before = "stands before its own and fits whenever that does"
    assert load_config(category(decoder={"match": match})).notes == (
        f"output_features.0.decoder.match.very good: the label 'very good' is never found, since the rule of 'good' "
        f"{before}",
        f"output_features.0.decoder.match.neutral: the label 'neutral' is never found, since the rule of 'bad' "
        f"{before}",
    )
