"""What is said of figures that are not what they seem."""

import pytest
from tests.report.hand_made_runs import figures, two_by_three

from brim.report import comparison_notes


def notes(runs, *, rows=None, seeds=(0, 1, 2)):
    return comparison_notes(runs, rows or {}, seeds=seeds)


def test_equal_runs_need_two_lines():
    found = notes(two_by_three())
    assert len(found) == 2
    assert "its last weights count, not its best" in found[0]
    assert "95% interval over seeds, by Student's t" in found[1]


def test_one_seed_is_said_to_be_little():
    assert any("one seed has no interval" in note for note in notes({"a": {0: figures(1.0)}}, seeds=(0,)))


def test_training_losses_are_said_to_be_such():
    runs = {name: {0: figures(1.0, losses={"train": 1.0})} for name in "ab"}
    assert any("the loss is the training's, the mean of the last tenth of the tokens" in note for note in notes(runs))


@pytest.mark.parametrize(("tokens", "is_said"), [(100_009, False), (101_000, True)])
def test_other_tokens_are_told_with_both_numbers(tokens, is_said):
    runs = {"a": {0: figures(1.0, tokens=100_000)}, "b": {0: figures(1.0, tokens=tokens)}}
    said = [note for note in notes(runs) if note.startswith("not equal in tokens")]
    assert bool(said) is is_said
    if is_said:
        assert "b was trained on 101,000, a on 100,000 (+1.0%)" in said[0]


def test_losses_over_other_tokens_are_told():
    runs = two_by_three()
    runs["b"][1] = figures(1.0, evaluated_tokens={"validation": 51}, test=None)
    said = [note for note in notes(runs) if "over other tokens" in note]
    assert said == [
        "the validation losses of b and a are means over other tokens, 51 and 50: their difference is not one of "
        "learning alone"
    ]


def test_other_rows_are_told():
    rows = {("a", 0): {"train": "x"}, ("b", 0): {"train": "y"}, ("a", 1): {"train": "z"}, ("b", 1): {"train": "z"}}
    assert any("b does not have the same rows as a" in note for note in notes(two_by_three(), rows=rows))
    del rows["a", 0]
    assert not any("same rows" in note for note in notes(two_by_three(), rows=rows))


def test_steps_without_an_update_are_counted():
    runs = two_by_three()
    runs["b"] = {seed: figures(1.0, num_skipped=2) for seed in (0, 1)}
    assert any(note.startswith("b: 4 steps were left out") for note in notes(runs))
