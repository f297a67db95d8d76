"""Labels of many texts, and what is said of them."""

from __future__ import annotations

from brim.config import LabelReader
from brim.config.schema import OutputFeature
from brim.infer import LabelCounts, extract


def _feature(*, constrained=False, **match):
    rules = {label: {"type": kind, "value": value} for label, (kind, value) in match.items()}
    return OutputFeature.model_validate(
        {
            "name": "a",
            "type": "category",
            "preprocessing": {"fallback_label": "none"},
            "decoder": {"match": rules, "constrain_to_vocabulary": constrained},
        }
    )


def _reader(**match):
    return LabelReader(_feature(**match))


ANY = _feature(good=("contains", "good"))
HINT = "; with output_features.0.decoder.constrain_to_vocabulary=true the model can write nothing but labels"


def test_fallbacks_are_counted_and_told_from_answers_that_say_so():
    counts = LabelCounts()
    labels = extract(
        [" good", "none", "", "well", "Good."], _reader(good=("contains", "good"), none=("contains", "none")), counts
    )
    assert labels == ["good", "none", "none", "none", "good"]
    assert counts.record() == {"labels": {"none": 3, "good": 2}, "num_fallback": 2, "num_looked_at_in_part": 0}
    told = "2 of 5 responses name no label and got the fallback label"
    assert counts.notes(ANY) == [told + HINT]
    assert counts.notes(_feature(constrained=True, good=("contains", "good"))) == [told]  # cut by max_new_tokens, say


def test_texts_that_were_not_looked_at_whole_are_counted():
    reader, counts = _reader(good=("regex", r"\w+!"), bad=("contains", "bad")), LabelCounts()
    assert extract(["fine!"], reader, counts) == ["good"]
    assert extract(["a" * 5_000 + "!"], reader, counts) == ["none"]
    assert counts.notes(ANY) == [
        f"1 of 2 responses name no label and got the fallback label{HINT}",
        "1 of 2 responses are so long that a regular expression could take over 10,000,000 steps; it looked at their "
        "beginning alone",
    ]


def test_nothing_is_said_of_nothing():
    assert LabelCounts().notes(ANY) == []
