"""Which configurations can be compared, and what is set so that they can."""

import shutil

import pytest

from brim.errors import ConfigError, InputError
from brim.workflows.compare.run import entrants_of

CONFIG = """\
base_model: {base}
dataset: {dataset}
random_seed: 7
input_features:
  - {{name: question, type: text}}
output_features:
  - {{name: answer, type: text}}
preprocessing: {{split: fixed}}
trainer: {{type: finetune, epochs: 2, effective_batch_size: 8}}
"""


@pytest.fixture
def write(tmp_path, tiny_base, sums_file):
    """write("b", old="new"): b.yaml, with texts put in the place of others."""

    def file(name, **changes):
        text = CONFIG.format(base=tiny_base, dataset=sums_file)
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return file


def test_what_is_set_for_all(write):
    first, second = entrants_of([write("a"), write("b")], ["trainer.learning_rate=0.5"], None)
    assert (first.name, second.name) == ("a", "b")
    assert first.overrides == second.overrides == ("trainer.learning_rate=0.5", "trainer.early_stop=-1")
    assert (second.config.trainer.learning_rate, second.config.trainer.early_stop) == (0.5, -1)
    assert first.changes == second.changes == ()


def test_the_data_set_is_set_for_all(write, tmp_path, sums_file):
    other = shutil.copy(sums_file, tmp_path / "it's: other.jsonl")
    found = entrants_of([write("a"), write("b")], [], other)
    assert [each.config.dataset for each in found] == [str(other)] * 2


def test_what_the_comparison_changes_is_told(write):
    files = [
        write("a"),
        write("b", **{"epochs: 2": "train_steps: 500", "random_seed: 7": "random_seed: 8"}),
        write("c", **{"epochs: 2": "epochs: 3"}),
    ]
    found = entrants_of(files, [], None)
    assert found[1].changes == (
        "b is trained on as many rows as a, whatever its trainer.train_steps (500) says",
        "b takes the seeds of a, not its own random_seed (8)",
    )
    assert found[2].changes == ("c is trained on as many rows as a, whatever its trainer.epochs (3) says",)
    assert found[0].changes == ()


def test_equal_numbers_of_steps_may_be_other_numbers_of_rows(write):
    files = [write(name, **{"epochs: 2": "train_steps: 5"}) for name in "ab"]
    first, second = entrants_of(files, [], None)
    assert first.changes == ()
    assert second.changes == ("b is trained on as many rows as a, whatever its trainer.train_steps (5) says",)


def test_names_are_made_unique(write, tmp_path):
    (tmp_path / "more").mkdir()
    file, upper = write("a"), write("A")
    copy = shutil.copy(file, tmp_path / "more" / "a.yaml")
    reserved = shutil.copy(file, tmp_path / "compare.json.yaml")
    found = entrants_of([file, copy, file, upper, reserved], [], None)
    assert [each.name for each in found] == ["a", "a-2", "a-3", "A-4", "compare.json-2"]
    assert found[0].digest == found[1].digest


def test_the_digest_is_of_the_settings_but_not_of_the_seed(write):
    found = entrants_of(
        [write("a"), write("b", **{"random_seed: 7": "random_seed: 8"}), write("c", **{"epochs: 2": "epochs: 3"})],
        [],
        None,
    )
    assert found[0].digest == found[1].digest != found[2].digest


def test_a_run_is_a_configuration_too(write, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(write("a"), run / "config.yaml")
    found = entrants_of([run, tmp_path / "a.yaml"], [], None)
    assert [each.name for each in found] == ["run", "a"]


def test_a_run_s_word_for_code_is_not_enough(write, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(write("a", random_seed="trust_remote_code: true\nrandom_seed"), run / "config.yaml")
    with pytest.raises(ConfigError, match="trust_remote_code is true in the configuration of a run"):
        entrants_of([run, tmp_path / "a.yaml"], [], None)
    entrants_of([run, tmp_path / "a.yaml"], ["trust_remote_code=false"], None)


@pytest.mark.parametrize("number", [0, 1])
def test_two_are_needed(write, number):
    with pytest.raises(InputError, match="there is nothing to compare") as caught:
        entrants_of([write("a")][:number], [], None)
    assert "brim train" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("split: fixed", "split: random", "preprocessing.split is"),
        ("{split: fixed}", "{split: fixed, sample_size: 9}", "preprocessing.sample_size is 9, in the first"),
        ("{split: fixed}", "{split: fixed, sample_ratio: 0.5}", "preprocessing.sample_ratio is 0.5, in the first"),
        ("name: answer", "name: question_2", 'output_features is ["question_2", "text"]'),
        ("sums.jsonl", "other.jsonl", "dataset is"),
    ],
)
def test_losses_of_other_rows_or_answers_are_refused(write, tmp_path, old, new, what):
    (tmp_path / "other.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        entrants_of([write("a"), write("b", **{old: new})], [], None)
    (problem,) = caught.value.problems
    assert problem.what.startswith(what)
    assert problem.where == str(tmp_path / "b.yaml")


def test_all_that_is_wrong_is_told_at_once(write):
    files = [write("a"), write("b", **{"type: finetune, epochs: 2, effective_batch_size: 8": "type: none"})]
    files.append(write("c", **{"split: fixed": "split: random"}))
    with pytest.raises(ConfigError) as caught:
        entrants_of(files, [], None)
    assert [problem.what[:34] for problem in caught.value.problems] == [
        "this configuration trains nothing",
        'preprocessing.split is {"type": "r',
    ]


def test_data_is_needed(write, tmp_path):
    for name in "ab":
        file = write(name)
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "dataset" not in line))
    with pytest.raises(ConfigError, match="there is no data set"):
        entrants_of([tmp_path / "a.yaml", tmp_path / "b.yaml"], [], None)


def test_files_that_are_not_there(tmp_path, write):
    with pytest.raises(InputError, match="no such file"):
        entrants_of([write("a"), tmp_path / "none.yaml"], [], None)
    with pytest.raises(InputError, match="this folder is not a run"):
        entrants_of([write("a"), tmp_path], [], None)
