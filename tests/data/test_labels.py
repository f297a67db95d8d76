"""Labels: those that the data has, unknown and misspelt ones; and texts beyond what is tokenized."""

import numpy as np
import pytest
from ruamel.yaml import YAML
from tests.messages import refused, says

from brim.config import load_config
from brim.config.text import dump
from brim.data import check_data, prepare, slip_notes, with_labels_of_data
from brim.data.labels import MOST_LABELS, label_slips
from brim.data.read import RowFaults, read
from brim.data.tokens import Texts
from brim.data.usable import bounded
from brim.errors import ConfigError, DataError

LABELS = {"good": {"type": "contains", "value": "good"}, "bad": {"type": "regex", "value": "bad|poor"}}


@pytest.fixture
def prepared(encoder):
    """What becomes of rows with these labels."""

    def make(labels, *, preprocessing=None, match=LABELS):
        feature = {"preprocessing": {"fallback_label": "none of them"}, "decoder": {"match": match}}
        config = config_of(trainer="none", feature=feature, preprocessing=preprocessing or {})
        return prepare(read(columns(*labels)), config, encoder, context_length=None, only="full")

    return make


def config_of(*, trainer="finetune", feature=None, **keys):
    features = [{"name": "q", "type": "text"}], [{"name": "label", "type": "category", **(feature or {})}]
    sections = {"input_features": features[0], "output_features": features[1], "trainer": {"type": trainer}}
    return load_config({"base_model": "base", **sections, **keys}).config


def columns(*labels):
    return {"q": [f"q{number}" for number in range(len(labels))], "label": list(labels)}


def test_labels_are_answers_as_they_stand_in_the_data(prepared, encoder):
    rows = prepared(["good", " bad", "none of them"]).splits["full"]
    answers = [encoder.decode(row.input_ids[row.supervised], skip_special_tokens=True) for row in rows]
    assert answers == ["good", " bad", "none of them"]
    match = {str(n): {"type": "contains", "value": str(n)} for n in (1, 2)}
    assert len(prepared([1, 2, 2], match=match).splits["full"]) == 3
    with pytest.raises(DataError, match=r"label '1\.5', which is unknown"):
        prepared([1.5, 2, 2, 2], match={**match, "2.0": {"type": "contains", "value": "2"}})


def test_unknown_labels_are_told_with_their_rows_or_left_out(prepared):
    with refused(
        "the given columns, row 1: column `label` holds the label 'Good', which is unknown (did you mean good?)",
        "the given columns, row 3: … the label 'poor', which is unknown … good, bad, none of them "
        "… correct the data, or give the label a rule … preprocessing.on_bad_row: drop",
        by=DataError,
    ):
        prepared(["good", "Good", "bad", "poor", "bad", "bad", "good"])
    made = prepared(["good", "nil", "bad"], preprocessing={"on_bad_row": "drop"})
    assert made.splits["full"].keys.tolist() == [0, 2]
    (entry,) = made.ledger
    assert (entry.key, entry.event) == (1, "dropped_bad")
    assert "the label 'nil', which is unknown" in entry.why
    match = {f"label {n}": {"type": "contains", "value": f"{n}"} for n in range(12)}
    with pytest.raises(DataError, match=r"label 9 or 3 more"):
        prepared(["label 1", "label 2", "x"], match=match)


def test_the_labels_are_the_values_of_the_column_in_order_whatever_that_of_the_rows():
    source = read(columns("red", "green ", "very red", None, "", "Blue", "red"))
    config, choices = with_labels_of_data(config_of(), source)
    feature = config.output_features[0]
    assert list(feature.rules) == ["Blue", "green", "very red", "red"]  # the rule of red would find it in very red
    assert {rule.type for rule in feature.rules.values()} == {"contains"}
    assert feature.fallback_label == "red"
    match, fallback = map(str, choices)
    assert says(match, "output_features.0.decoder.match: 4 labels … column `label`: Blue, green, red, very red)")
    assert says(fallback, "output_features.0.preprocessing.fallback_label: red (the most frequent label, of 2 rows)")
    assert with_labels_of_data(config, read(columns("other", "labels"))) == (config, ())
    assert load_config(YAML(typ="safe").load(dump(config))).config == config
    for order in (["b", "a", "c", "a"], ["a", "a", "c", "b"], ["c", "b", "a", "a"]):
        feature = with_labels_of_data(config_of(), read(columns(*order)))[0].output_features[0]
        assert (list(feature.rules), feature.fallback_label) == (["a", "b", "c"], "a")


def test_numbers_may_be_labels_and_a_fallback_that_is_given_stays(encoder):
    source = read(columns(1, 0, 1, 2))
    config, _ = with_labels_of_data(config_of(**WHOLE), source)
    assert config.output_features[0].labels == ("0", "1", "2")
    assert len(prepare(source, config, encoder, context_length=64).splits["train"]) == 4
    given = config_of(feature={"preprocessing": {"fallback_label": "other"}})
    config, choices = with_labels_of_data(given, read(columns("a", "b")))
    assert config.output_features[0].labels == ("a", "b", "other")
    assert len(choices) == 1


WHOLE = {"preprocessing": {"split": {"probabilities": [1.0, 0.0, 0.0]}}}


def test_rows_without_a_label_are_left_out_and_counted_and_labels_stand_in_the_prompt(encoder):
    report = check_data(config_of(**WHOLE), read(columns("a", "", "b", " ", None)), encoder, context_length=64)
    assert report.splits[0].num_rows == 2
    (event,) = report.events
    assert says(event, "3 of 5 rows were dropped: … (no value in `label`)")
    assert report.notes[0].startswith("output_features.0.decoder.match: 2 labels (")
    config = config_of(**WHOLE, prompt={"template": "{__labels__}? {q}: "})
    report = check_data(config, read(columns("b", "a")), encoder, context_length=64, show=1)
    assert "a, b? q0: " in "".join(segment.text for segment in report.samples[0].segments)


MANY = [f"label {number}" for number in range(MOST_LABELS + 1)]
UNKNOWN = "… the labels of `label` are not known: no column `label`"
NO_LABELS = [
    (columns("a", "a", ""), "… column `label` holds 1 label … at least two"),
    (columns(*MANY[:40]), "… 40 different values in 40 rows: too many for labels … at most 1,000 … output_features.0.type: text"),
    (columns(*MANY, *MANY), "… 1,001 different values in 2,002 rows: too many for labels"),
    (columns("Bug", "bug", "Bug", "x", "log  in", "log in"),
     "… one label in 2 ways: 'Bug' (2 rows), 'bug' (1 row: the given columns, row 1) … write 'Bug' in all of these rows"),
    ({"q": ["x"], "answer": ["y"]}, f"{UNKNOWN} … name the labels in output_features.0.preprocessing.vocab … a run"),
]  # fmt: skip


@pytest.mark.parametrize("trainer", ["finetune", "none"])
def test_values_that_are_no_labels_are_told(encoder, trainer):
    for data, words in NO_LABELS:
        with pytest.raises(DataError) as caught:
            check_data(config_of(trainer=trainer), read(data), encoder, context_length=64)
        assert says(str(caught.value), words), caught.value


def test_each_way_of_writing_a_label_and_a_fallback_within_which_a_label_stands_are_told():
    ways = ["BUG", "x", "Bug", "log in", "bug", "Bug", "log  in", "log  in", "bug", "Bug"]
    row, writes = "the given columns, row", "the given columns: column `label` writes one label in"
    with refused(
        f"{writes} 3 ways: 'Bug' (3 rows), 'bug' (2 rows: {row} 4, {row} 8), 'BUG' (1 row: {row} 0)\n",
        f"{writes} 2 ways: 'log  in' (2 rows), 'log in' (1 row: {row} 3)\n",
    ):
        with_labels_of_data(config_of(), read(columns(*ways)))
    feature = {"preprocessing": {"fallback_label": "not a"}}
    with pytest.raises(ConfigError, match="the model's text 'not a', which it learns to write, would be read as the l"):
        with_labels_of_data(config_of(feature=feature), read(columns("a", "b")))


def slips(*labels, **keys):
    return [(slip.label, slip.meant, slip.rows) for slip in label_slips(config_of(**keys), read(columns(*labels)))]


def test_a_rare_label_beside_a_common_one_is_a_slip_with_a_tenth_of_its_rows():
    for rare, common in [
        ("Biling", "Billing"), ("Billling", "Billing"), ("Blling", "Billing"), ("Bililng", "Billing"),
        ("Biljing", "Billing"), ("log-inn", "log in"),
    ]:  # fmt: skip
        assert slips(*[common] * 10, rare, *["other"] * 5) == [(rare, common, [10])]
    assert slips(*["Passwort reset"] * 10, "Passwrd reset", *["other"] * 5) == []  # two letters are none
    for rare, common in [
        ("level 2", "level 1"), ("v101", "v100"), ("class b", "class a"), ("group ab", "group cd"), ("rat", "cat"),
        ("no", "yes"), ("q2 report", "q1 report"), ("refund", "Billing"),
    ]:  # fmt: skip
        assert slips(*[common] * 30, rare) == []  # they differ for a reason
    assert slips(*["Billing"] * 20, "Biling", "Biling") == [("Biling", "Billing", [20, 21])]
    assert slips(*["Billing"] * 19, "Biling", "Biling") == []
    assert slips(*["Billing"] * 20, *["Bilding"] * 20, "Biling") == []
    named = {"preprocessing": {"vocab": ["Billing", "Biling"], "fallback_label": "Billing"}}
    assert slips(*["Billing"] * 20, "Biling", feature=named) == []


def test_check_advises_on_slips_with_their_lines(encoder, tmp_path):
    labels = ["Billing"] * 25 + ["Refund"] * 25
    labels[7], labels[40] = "Biling", "Refunds"
    (tmp_path / "tickets.csv").write_text("q,label\n" + "".join(f"q{n},{label}\n" for n, label in enumerate(labels)))
    report = check_data(config_of(), read(tmp_path / "tickets.csv"), encoder, context_length=64)
    first, _ = (finding for finding in report.advice if finding.kind == "misspelt_label")
    assert says(first.what, "the label 'Biling' has 1 row and 'Billing', but for a letter the same, 24")
    assert first.places == ("tickets.csv:9",)
    (note,) = slip_notes(config_of(), read(tmp_path / "tickets.csv"))
    assert says(note, "… 'Biling' (1 row: tickets.csv:9) beside 'Billing' (24 rows); 'Refunds' (1 row: tickets.csv:42)")
    assert (note.kind, note.topic) == ("warning", "rows")


def test_a_thousand_labels_are_compared_in_little_time(monkeypatch):
    """Not each with each other: a label is compared with those alone that a letter less may make the same."""
    compared = []
    from brim.data import labels as known_labels

    def counting(name, names, **keys):
        compared.extend(names)

    monkeypatch.setattr(known_labels, "misspelt", counting)
    words = [f"{a}{b}{c}{d}" for a in "ab" for b in ("cde", "fgh") for c in "ijklm" for d in ("nopq", "rstu", "vwxy")]
    slips(*[word for word in words for _ in range(30)], *[f"{word}zz" for word in words])
    assert len(compared) < len(words)


def batch(prompts, answers):
    return Texts(keys=np.arange(10, 10 + len(prompts)), prompts=prompts, answers=answers)


def test_texts_beyond_the_bound_are_faults_of_their_rows():
    faults, texts = RowFaults(locate=str), [batch(["a", "bc"], ["d", "e"]), batch(["a"], [])]
    assert all(given is passed for given, passed in zip(texts, bounded(texts, faults, most=2), strict=True))
    assert faults.problems == {}
    texts = [batch(["a", "bcd", "e"], ["f", "g", "hijk"]), batch(["xyz"], [])]
    (passed,) = bounded(texts, faults, most=2)
    assert (passed.keys.tolist(), passed.prompts, passed.answers) == ([10], ["a"], ["f"])
    whats = {key: problem.what for key, problem in faults.problems.items()}
    assert whats == {key: f"a text of {number} characters" for key, number in ((11, 3), (12, 4), (10, 3))}
    assert faults.problems[11].expected == "at most 2 characters"
