"""The label that a text stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from brim.config import LabelReader, Reading
from brim.config.schema import OutputFeature
from brim.config.template import characters_within

MATCH = {
    "positive": {"type": "contains", "value": "Positive"},
    "neutral": {"type": "regex", "value": r"\bneutral\b"},
    "mixed": {"type": "regex", "value": r"(?-i:MIX)"},
    "negative": {"type": "contains", "value": "negative"},
}


def reader(match=MATCH, fallback="neutral"):
    return LabelReader(
        OutputFeature.model_validate(
            {
                "name": "label",
                "type": "category",
                "preprocessing": {"fallback_label": fallback},
                "decoder": {"match": match},
            }
        )
    )


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("positive", "positive"),
        ("It is POSITIVE.", "positive"),
        ("negative, not positive", "positive"),  # the first rule decides, wherever its value stands
        (" Neutral!", "neutral"),
        ("MIX", "mixed"),
        ("rather negative", "negative"),
    ],
)
def test_the_first_rule_that_fits_decides(text, label):
    assert reader().read(text) == Reading(label=label)


@pytest.mark.parametrize("text", ["", "neutrality", "mix", "posi tive"])
def test_the_fallback_is_told_from_its_own_rule(text):
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
    match = {
        f"label {number}": {"type": "regex" if number % 2 else "contains", "value": value}
        for number, value in enumerate(values)
    }
    assert reader(match, "none").read(text).label == _as_ludwig_does(text, match, "none")


def test_an_expression_sees_the_beginning_of_a_text_that_could_take_for_ever():
    slow = r"\w*\s*\w*!"
    within = characters_within(slow, 10_000_000)
    assert within == 124  # (10^7 · 4!)^(1/4)
    match = {"loud": {"type": "regex", "value": slow}, "last": {"type": "contains", "value": "end"}}
    loud, quiet = "a" * (within - 1) + "!", "a" * within + "!"
    assert reader(match, "other").read(loud) == Reading(label="loud")
    assert reader(match, "other").read(quiet) == Reading(label="other", is_fallback=True, is_partial=True)
    assert reader(match, "other").read(quiet + "end") == Reading(label="last", is_partial=True)


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [("word", 10_000_000), ("one|two", 5_000_000), (r"\w+!", 4472), (r".*word.*", 391)],
)
def test_more_repeats_see_less(pattern, characters):
    assert characters_within(pattern, 10_000_000) == characters
