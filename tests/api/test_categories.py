"""Categories, from the configuration to labels in a file and their figures."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from brim import Model
from brim.errors import ConfigError, DataError, OutputError

MATCH = {
    "small": {"type": "contains", "value": "small"},
    "large": {"type": "regex", "value": r"\blarge\b"},
    "very large": {"type": "contains", "value": "very large"},
}
HINT = "; with output_features.0.decoder.constrain_to_vocabulary=true the model can write nothing but labels"


@pytest.fixture
def category(tiny_base):
    """A model that is asked for the size of a sum."""

    def make(*, constrained=True, match=MATCH, fallback="none", **keys):
        ordered = dict(sorted(match.items(), key=lambda item: -len(item[0])))  # the longest label's rule first
        return Model(
            {
                "base_model": str(tiny_base),
                "input_features": [{"name": "question", "type": "text"}],
                "output_features": [
                    {
                        "name": "size",
                        "type": "category",
                        "preprocessing": {"fallback_label": fallback},
                        "decoder": {"match": ordered, "constrain_to_vocabulary": constrained},
                    }
                ],
                "generation": {"do_sample": False},
                **keys,
            }
        )

    return make


QUESTIONS = [f"add {a} and {b} =" for a in range(4) for b in range(3)]


def test_nothing_but_labels_is_generated(category):
    answers = category().generate(QUESTIONS)
    assert {answer.strip() for answer in answers} <= {*MATCH, "none"}


def test_as_many_tokens_are_planned_as_the_longest_label_has(category):
    session = category()._open()
    assert session.config.generation.max_new_tokens == len(" very large") + 1  # letters are tokens, and the end is one
    chosen = [str(choice) for choice in session.choices if choice.key == "generation.max_new_tokens"]
    assert chosen == ["generation.max_new_tokens: 12 (the longest label and its end)"]


def test_a_length_that_is_set_is_lowered_and_said(category):
    session = category(generation={"max_new_tokens": 64})._open()
    chosen = [str(choice) for choice in session.choices if choice.key == "generation.max_new_tokens"]
    assert chosen == ["generation.max_new_tokens: 12 (the longest label and its end; 64 are set)"]


def test_a_length_that_cuts_labels_is_refused(category):
    with pytest.raises(ConfigError) as caught:
        category(generation={"max_new_tokens": 10})._open()
    assert [str(problem) for problem in caught.value.problems] == [
        "generation.max_new_tokens: generation.max_new_tokens 10 cuts labels\n"
        "  expected: at least 11 tokens, those of the longest label\n  fix: raise it, or remove it"
    ]
    with pytest.raises(ConfigError, match="cuts labels"):
        category().generate(QUESTIONS, max_new_tokens=3)


def test_without_the_constraint_texts_are_as_long_as_ever(category):
    assert category(constrained=False, generation={"max_new_tokens": 64})._open().config.generation.max_new_tokens == 64


@pytest.mark.parametrize(
    ("keys", "tokens", "reason"),
    [
        ({}, 12, "the longest label and its end"),
        ({"preprocessing": {"global_max_sequence_length": 60}}, 12, "the longest label and its end"),
        ({"generation": {"max_new_tokens": 64}}, 64, None),
        ({"trainer": {"type": "none"}}, None, "no length is set"),
    ],
)
def test_a_label_that_is_learned_is_as_long_as_the_longest(category, keys, tokens, reason):
    """Of a model that was taught nothing, words before the label are room that is needed."""
    session = category(constrained=False, **{"trainer": {"type": "finetune"}, **keys})._open()
    chosen = {choice.key: (choice.value, choice.reason) for choice in session.choices}
    found = chosen.get("generation.max_new_tokens")
    assert (found is None) == (reason is None)
    assert found is None or reason in found[1]
    if tokens is not None:
        assert session.config.generation.max_new_tokens == tokens


def test_a_length_of_the_output_wins_over_the_labels(category):
    model = category(constrained=False, trainer={"type": "finetune"})
    tree = model.config.model_dump(exclude_unset=True)
    tree["output_features"][0]["preprocessing"]["max_sequence_length"] = 5
    assert Model(tree)._open().config.generation.max_new_tokens == 5


def test_predictions_have_a_column_of_labels(category, tmp_path):
    said = []
    output = tmp_path / "sizes.jsonl"
    match = {"nine": {"type": "regex", "value": "9"}, "two": {"type": "contains", "value": "2"}}
    model = category(
        constrained=False, match=match, generation={"max_new_tokens": 24, "temperature": 1.0, "top_k": None}
    )
    result = model.predict({"question": QUESTIONS}, output=output, say=said.append)
    frame = result.predictions
    assert list(frame.columns)[:4] == ["row", "question", "size_response", "size_predictions"]
    expected = ["nine" if "9" in text else "two" if "2" in text else "none" for text in frame["size_response"]]
    assert frame["size_predictions"].tolist() == expected
    assert set(expected) == {"nine", "two", "none"}  # or the test would show little
    num_fallback = expected.count("none")
    assert result.summary["category"] == {
        "labels": dict(Counter(expected).most_common()),
        "num_fallback": num_fallback,
        "num_looked_at_in_part": 0,
    }
    assert f"{num_fallback} of 12 responses name no label and got the fallback label{HINT}" in said


def test_other_rules_need_no_other_responses(category, tmp_path):
    output = tmp_path / "sizes.jsonl"
    settings = {"constrained": False, "generation": {"max_new_tokens": 8}}
    before = category(**settings).predict({"question": QUESTIONS}, output=output)
    match = {"a": {"type": "contains", "value": "a"}, "other": {"type": "regex", "value": "."}}
    after = category(match=match, **settings).predict({"question": QUESTIONS}, output=output, resume=True)
    assert after.seconds == 0
    assert after.predictions["size_response"].tolist() == before.predictions["size_response"].tolist()
    assert after.predictions["size_predictions"].isin(["a", "other"]).all()
    assert json.loads(output.read_text().splitlines()[0])["size_predictions"] in ("a", "other")
    with pytest.raises(OutputError, match="constrain_to_vocabulary"):
        category(generation={"max_new_tokens": 8}, match={"a": match["a"], "b": match["a"] | {"value": "b"}}).predict(
            {"question": QUESTIONS}, output=output, resume=True
        )


def test_evaluation_generates_labels_by_itself(category):
    said = []
    match = {"nine": {"type": "regex", "value": "9"}, "two": {"type": "contains", "value": "2"}}
    model = category(
        constrained=False, match=match, generation={"max_new_tokens": 24, "temperature": 1.0, "top_k": None}
    )
    data = {"question": QUESTIONS, "size": ["nine", " two", "none"] * 4}
    predicted = model.predict({"question": QUESTIONS}).predictions["size_predictions"].tolist()
    result = model.evaluate(data, say=said.append)
    wanted = [label.strip() for label in data["size"]]
    right = [a == b for a, b in zip(predicted, wanted, strict=True)]
    assert result.rows["label"].tolist() == predicted
    assert result.metrics["category_accuracy"] == sum(right) / 12
    f1 = []
    for label in ("nine", "two", "none"):
        both = sum(a == b == label for a, b in zip(predicted, wanted, strict=True))
        f1.append(2 * both / (predicted.count(label) + wanted.count(label)))
    assert result.metrics["macro_f1"] == pytest.approx(sum(f1) / 3)
    assert result.intervals["category_accuracy"].low <= sum(right) / 12 <= result.intervals["category_accuracy"].high
    assert f"{predicted.count('none')} of 12 responses name no label and got the fallback label{HINT}" in said
    assert "bleu" not in result.metrics


def test_evaluation_refuses_unknown_labels(category):
    with pytest.raises(DataError, match="the label 'huge', which is unknown"):
        category().evaluate({"question": QUESTIONS, "size": ["small"] * 11 + ["huge"]})
