"""Labels of many texts, and what is said of them."""

from __future__ import annotations

from brim.config.labels import LabelReader
from brim.config.schema import OutputFeature
from brim.infer.labels import extract


def _reader(**match):
    rules = {label: {"type": kind, "value": value} for label, (kind, value) in match.items()}
    feature = {
        "name": "a",
        "type": "category",
        "preprocessing": {"fallback_label": "none"},
        "decoder": {"match": rules},
    }
    return LabelReader(OutputFeature.model_validate(feature))


def test_fallbacks_are_counted_and_told_from_answers_that_say_so():
    reader = _reader(good=("contains", "good"), none=("contains", "none"))
    made = extract([" good", "none", "", "well", "Good."], reader)
    assert made.labels == ["good", "none", "none", "none", "good"]
    assert (made.num_fallback, made.num_partial) == (2, 0)
    assert made.notes() == ["2 of 5 responses name no label and got the fallback label"]


def test_texts_that_were_not_looked_at_whole_are_counted():
    reader = _reader(good=("regex", r"\w+!"), bad=("contains", "bad"))
    made = extract(["fine!", "a" * 5_000 + "!"], reader)
    assert made.labels == ["good", "none"]
    assert made.notes() == [
        "1 of 2 responses name no label and got the fallback label",
        "1 of 2 responses are so long that a regular expression would take over 10,000,000 steps; only their "
        "beginning was looked at",
    ]


def test_nothing_is_said_of_nothing():
    assert extract([], _reader(good=("contains", "good"))).notes() == []
