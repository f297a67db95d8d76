"""What a prompt's keys ask of each other; categories; and the label that a text stands for."""

from time import process_time

import pytest
from hypothesis import given, strategies as st
from tests.messages import refused, says

from brim.config import load_config
from brim.config.prompt_rules import unreachable
from brim.config.prompts import LabelReader, Reading, characters_within
from brim.config.schema import OutputFeature
from brim.config.text import dump

SEMANTIC = {"type": "semantic", "k": 2, "model_name": "folder"}
REFUSED_PROMPTS = [
    {"task": "Classify.", "template": "{question}"},
    {"template": "{__task__} {question}"},
    {"template": "{question}", "retrieval": {"type": "random"}},
    {"template": "{__context__} {question}", "retrieval": {"type": None, "k": 0}},
    {"template": "Guess {__context__}", "retrieval": {"type": "random"}},
    {"task": "Classify.", "retrieval": {"k": 2}},
    {"task": "Classify.", "retrieval": {"model_name": "x"}},
    {"retrieval": {"type": "random"}},
    {"task": "Classify.", "retrieval": {"type": "semantic"}},
    {"task": "Classify.", "retrieval": {"type": "random", "model_name": "x"}},
    {"task": "Classify.", "template": "{__task__} {__context__} {answer}", "retrieval": SEMANTIC},
    {"task": "Classify.", "retrieval": {"type": "nearest"}},
    {"task": "Classify.", "retrieval": {**SEMANTIC, "index_name": "../mine"}},
]


def test_prompts_that_are_refused(minimal, refusals):
    asked = minimal(input_features=[{"name": "question", "type": "text"}])
    refusals("prompts.txt", lambda prompt: load_config({**asked, "prompt": prompt}), REFUSED_PROMPTS)


def test_prompts_that_are_accepted_and_a_type_without_a_number_asks_for_one_example(minimal):
    for prompt, num_examples in [
        ({"task": "Classify."}, 0), ({"task": "Classify.", "retrieval": None}, 0), ({"task": "Classify.", "retrieval": {}}, 0),
        ({"task": "Classify.", "retrieval": {"type": None, "k": 0, "model_name": None, "index_name": None}}, 0),
        ({"task": "Classify.", "retrieval": {"type": "random"}}, 1), ({"task": "Classify.", "retrieval": SEMANTIC}, 2),
        ({"task": "Classify.", "retrieval": {"type": "random", "k": 0}}, 1),
        ({"task": "Classify.", "template": "{__task__} {__context__} {__sample__}", "retrieval": SEMANTIC}, 2),
        ({"template": "{__context__} {a column}", "retrieval": {"type": "random", "k": 3}}, 3),
    ]:  # fmt: skip
        assert load_config(minimal(prompt=prompt)).config.prompt.num_examples == num_examples


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
        labels = {"fallback_label": "neutral"} if preprocessing is None else preprocessing
        feature = {"name": "answer", "type": "category", "preprocessing": labels, "decoder": decoder}
        return minimal(output_features=[feature], **keys)

    return build


def _feature(source):
    return load_config(source).config.output_features[0]


def test_labels_are_those_of_the_rules_of_vocab_or_of_the_data(category, minimal):
    assert _feature(category()).labels == ("positive", "neutral", "negative")
    assert _feature(category(preprocessing={"fallback_label": "none of them"})).labels == (*MATCH, "none of them")
    vocab = ("negative", "neutral", "positive", "x")
    assert _feature(category(preprocessing={"fallback_label": "neutral", "vocab": list(vocab)})).labels == vocab
    vocab = ("red", "very red", "light red", "other")
    feature = _feature(category(decoder={}, preprocessing={"fallback_label": "other", "vocab": list(vocab)}))
    assert feature.labels == vocab
    assert [(label, rule.type, rule.value) for label, rule in feature.rules.items()] == [
        (label, "contains", label) for label in ("light red", "very red", "red", "other")
    ]
    feature = _feature(category(decoder={}, preprocessing={}))
    assert (feature.labels, dict(feature.rules)) == ((), {})
    assert _feature(category(decoder={}, preprocessing={"fallback_label": "other"})).labels == ()
    feature = _feature(minimal())  # a text
    assert (feature.labels, feature.categories, feature.fallback_label) == ((), None, None)
    given = category(preprocessing={}, decoder={**DECODER, "fallback_label": "neutral"})
    assert _feature(given).fallback_label == "neutral"
    assert _feature(category(decoder={"match": MATCH})) == _feature(category())


def test_a_dumped_category_loads_back(category):
    config = load_config(category(decoder={**DECODER, "constrain_to_vocabulary": True})).config
    assert load_config(config.model_dump()).config == config
    assert list(config.model_dump()["output_features"][0]["decoder"]["match"]) == list(MATCH)
    assert "constrain_to_vocabulary: true" in dump(config)


def test_labels_of_a_file_keep_their_places(file):
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
    match = "output_features.0.decoder.match"
    with refused(
        f"config.yaml:9: {match}.yes.type is 'contians' … contains or regex … did you mean contains?",
        f"config.yaml:10: {match}.2.value is refused as a regular expression … position 3 … use type: contains",
        f"config.yaml:11: {match}.3 is 'word' … a mapping",
        f"config.yaml:12: {match}.4.type: json_schema is not supported yet … contains or regex",
    ):
        load_config(file(text))


MATCHING = "output_features.0.decoder.match"
REFUSED_CATEGORIES = [
    {"preprocessing": {}},
    {"decoder": {**DECODER, "fallback_label": "negative"}},
    {"decoder": {"match": {}}},
    {"decoder": "text_extractor"},
    {"decoder": {"match": {"neutral": MATCH["neutral"]}}},
    {"decoder": {"match": {**MATCH, " mixed": {"type": "contains", "value": "mixed"}}}},
    {"preprocessing": {"fallback_label": "neutral", "vocab": ["positive", "neutral"]}},
    {"decoder": {"match": {**MATCH, "negative": {"type": "regex", "value": "(no+)+$"}}}},
    {"decoder": {**DECODER, "constrain_to_vocabulary": True}, "generation": {"min_new_tokens": 2}},
]


def test_categories_that_are_refused(category, refusals):
    refusals("categories.txt", lambda keys: load_config(category(**keys)), REFUSED_CATEGORIES)


def test_labels_that_the_model_writes_must_be_read_as_themselves(category):
    swapped = {"bad": {"type": "contains", "value": "poor"}, "very bad": {"type": "contains", "value": "very bad"}}
    fallback = {"fallback_label": "very bad"}
    for keys, why in [
        ({"decoder": {"match": swapped, "constrain_to_vocabulary": True}}, "decoder.constrain_to_vocabulary lets it"),
        ({"decoder": {"match": swapped}, "trainer": {"type": "finetune"}}, "it learns to"),
    ]:
        with refused(f"{MATCHING}.bad: the model's text 'bad', which {why} write, … the label 'very bad'"):
            load_config(category(preprocessing=fallback, **keys))
    load_config(category(decoder={"match": swapped}, preprocessing=fallback))


def test_labels_that_are_never_found_are_noted(category):
    (note,) = load_config(category(preprocessing={"fallback_label": "none", "vocab": [*MATCH, "mixed"]})).notes
    assert says(note, "output_features.0.preprocessing.vocab: the label 'mixed' is never found, since it has no rule")
    rules = {"good": "contains Good", "very good": "contains very good", "bad": "regex bad", "neutral": "regex bad"}
    match = {label: dict(zip(("type", "value"), rule.split(" ", 1), strict=True)) for label, rule in rules.items()}
    good, bad = load_config(category(decoder={"match": match})).notes
    assert says(good, f"{MATCHING}.very good: … never found, since the rule of 'good' stands before its own")
    assert says(bad, f"{MATCHING}.neutral: … never found, since the rule of 'bad' stands before its own")


def of_rules(rules):
    match = {str(number): {"type": kind, "value": value} for number, (kind, value) in enumerate(rules)}
    return OutputFeature.model_validate({"name": "a", "type": "category", "decoder": {"match": match}})


@given(st.lists(st.tuples(st.sampled_from(["contains", "regex"]), st.text("abA", min_size=1, max_size=4)), max_size=12))
def test_the_rule_that_leaves_another_nothing_is_the_first_of_all_earlier_ones(rules):
    def takes_all(earlier, rule):
        within = earlier[0] == rule[0] == "contains" and earlier[1].lower() in rule[1].lower()
        return earlier == rule or within

    expected = [
        (str(number), str(next(at for at in range(number) if takes_all(rules[at], rule))))
        for number, rule in enumerate(rules)
        if any(takes_all(earlier, rule) for earlier in rules[:number])
    ]
    assert not rules or unreachable(of_rules(rules)) == expected


def test_ten_times_the_labels_take_no_hundred_times_as_long():
    def cpu_s(num_labels):
        feature = of_rules([("contains", f"label {number:04}") for number in range(num_labels)])
        taken = []
        for _ in range(3):
            start = process_time()
            assert unreachable(feature) == []
            taken.append(process_time() - start)
        return min(taken)

    assert cpu_s(3000) < 35 * cpu_s(300)


SPOKEN = {
    "positive": {"type": "contains", "value": "Positive"},
    "neutral": {"type": "regex", "value": r"\bneutral\b"},
    "mixed": {"type": "regex", "value": r"(?-i:MIX)"},
    "negative": {"type": "contains", "value": "negative"},
}


def reader(match=SPOKEN, fallback="neutral"):
    feature = {"name": "label", "type": "category", "preprocessing": {"fallback_label": fallback}}
    return LabelReader(OutputFeature.model_validate({**feature, "decoder": {"match": match}}))


def test_the_first_rule_that_fits_decides_and_the_fallback_is_told_from_its_own_rule():
    for text, label in {
        "positive": "positive", "It is POSITIVE.": "positive", " Neutral!": "neutral", "MIX": "mixed",
        "negative, not positive": "positive",  # the first rule decides, wherever its value stands
        "rather negative": "negative",
    }.items():  # fmt: skip
        assert reader().read(text) == Reading(label=label)
    for text in ["", "neutrality", "mix", "posi tive"]:
        assert reader().read(text) == Reading(label="neutral", is_fallback=True)


def _as_ludwig_does(text, match, fallback):
    """Written from the description of Ludwig's matcher: the text in lower case, the value as it is."""
    import re

    text = text.lower()
    for label, rule in match.items():
        found = rule["value"] in text if rule["type"] == "contains" else re.findall(rule["value"], text)
        if found:
            return label
    return fallback


@given(
    text=st.text(alphabet="aAbB c", max_size=12), values=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1)
)
def test_rules_in_lower_case_mean_what_they_mean_to_ludwig(text, values):
    kinds = ("contains", "regex")
    match = {f"label {number}": {"type": kinds[number % 2], "value": value} for number, value in enumerate(values)}
    assert reader(match, "none").read(text).label == _as_ludwig_does(text, match, "none")


def test_an_expression_sees_the_beginning_of_a_text_that_could_take_for_ever():
    slow = r"\w*\s*\w*!"
    within = characters_within(slow, 10_000_000)
    assert within == 124  # (10^7 · 4!)^(1/4)
    assert characters_within("one|two", 10_000_000) == 5_000_000  # each choice is another way
    match = {"loud": {"type": "regex", "value": slow}, "last": {"type": "contains", "value": "end"}}
    loud, quiet = "a" * (within - 1) + "!", "a" * within + "!"
    assert reader(match, "other").read(loud) == Reading(label="loud")
    assert reader(match, "other").read(quiet) == Reading(label="other", is_fallback=True, is_partial=True)
    assert reader(match, "other").read(quiet + "end") == Reading(label="last", is_partial=True)
