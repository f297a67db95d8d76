"""Labels in the data that the configuration does not know."""

from __future__ import annotations

import pytest

from brim.config import load_config
from brim.data import prepare, read
from brim.errors import DataError

LABELS = {"good": {"type": "contains", "value": "good"}, "bad": {"type": "regex", "value": "bad|poor"}}


@pytest.fixture
def prepared(encoder):
    """What becomes of rows with these labels."""

    def make(labels, *, preprocessing=None, match=LABELS):
        config = load_config(
            {
                "base_model": "base",
                "input_features": [{"name": "q", "type": "text"}],
                "output_features": [
                    {
                        "name": "label",
                        "type": "category",
                        "preprocessing": {"fallback_label": "none of them"},
                        "decoder": {"match": match},
                    }
                ],
                "preprocessing": preprocessing or {},
            }
        ).config
        source = read({"q": ["what?"] * len(labels), "label": list(labels)})
        return prepare(source, config, encoder, context_length=None, only="full")

    return make


def test_labels_are_answers_as_they_stand_in_the_data(prepared, encoder):
    rows = prepared(["good", " bad", "none of them"]).splits["full"]
    answers = [encoder.decode(row.input_ids[row.supervised], skip_special_tokens=True) for row in rows]
    assert answers == ["good", " bad", "none of them"]


def test_unknown_labels_are_told_with_their_rows(prepared):
    labels = ["good", "Good", "bad", "poor", "bad", "bad", "good"]
    with pytest.raises(DataError) as caught:
        prepared(labels)
    assert [str(problem) for problem in caught.value.problems] == [
        "the given columns, row 1: column `label` holds the label 'Good', which is unknown (did you "
        "mean good?)\n  expected: good, bad, none of them",
        "the given columns, row 3: column `label` holds the label 'poor', which is unknown\n"
        "  expected: good, bad, none of them\n"
        "  fix: correct the data, or give the label a rule in output_features.0.decoder.match; or set "
        "preprocessing.on_bad_row: drop to go on without such rows",
    ]


def test_more_of_them_are_counted(prepared):
    with pytest.raises(DataError) as caught:
        prepared(["good"] * 10 + ["nil"] * 8)
    assert caught.value.problems[-1].what == "3 more rows are bad"


def test_they_can_be_left_out(prepared):
    made = prepared(["good", "nil", "bad"], preprocessing={"on_bad_row": "drop"})
    assert made.splits["full"].keys.tolist() == [0, 2]
    assert [(entry.key, entry.event) for entry in made.ledger.entries] == [(1, "dropped_bad")]
    assert "the label 'nil', which is unknown" in made.ledger.entries[0].why


def test_numbers_are_labels_as_they_are_written(prepared):
    match = {str(n): {"type": "contains", "value": str(n)} for n in (1, 2)}
    assert len(prepared([1, 2, 2], match=match).splits["full"]) == 3
    with pytest.raises(DataError, match=r"label '1\.5', which is unknown"):
        prepared([1.5, 2, 2, 2], match={**match, "2.0": {"type": "contains", "value": "2"}})


def test_twelve_labels_are_not_all_listed(prepared):
    match = {f"label {n}": {"type": "contains", "value": f"{n}"} for n in range(12)}
    with pytest.raises(DataError, match=r"label 9 or 3 more"):
        prepared(["label 1", "label 2", "x"], match=match)
