"""Folders that `datasets` saved."""

import pytest
from datasets import Dataset, DatasetDict

from brim.data import read
from brim.errors import DataError


@pytest.fixture(autouse=True)
def quiet():
    import datasets

    datasets.disable_progress_bars()


def test_a_saved_data_set_is_read_with_its_selection(tmp_path):
    Dataset.from_dict({"q": ["x", "y", "z"], "n": [1, 2, 3]}).select([2, 0]).save_to_disk(tmp_path / "saved")
    source = read(tmp_path / "saved")
    assert source.table.to_pylist() == [{"q": "z", "n": 3}, {"q": "x", "n": 1}]
    assert source.locate(1) == "saved, row 1"


def test_saved_splits_become_a_column(tmp_path):
    parts = {"train": ["a", "b"], "validation": ["c"], "test": ["d"]}
    saved = DatasetDict({name: Dataset.from_dict({"q": values}) for name, values in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved").table.to_pylist() == [
        {"q": "a", "split": 0},
        {"q": "b", "split": 0},
        {"q": "c", "split": 1},
        {"q": "d", "split": 2},
    ]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"train": {"q": ["a"]}, "unsupervised": {"q": ["b"]}},
            "saved: splits of the saved data set have unknown names: unsupervised\n"
            "  expected: train, validation, test\n"
            "  fix: save only the splits to learn from, under these names",
        ),
        (
            {"train": {"q": ["a"], "split": [0]}},
            "saved: the saved data set has splits and also a column `split`\n  fix: rename the column",
        ),
        (
            {"val": {"q": ["a"]}, "validation": {"q": ["b"]}},
            "saved: the saved data set has the validation split twice: val, validation\n"
            "  fix: save it under one of these names",
        ),
    ],
)
def test_splits_that_cannot_be_joined_are_told(tmp_path, parts, message):
    DatasetDict({name: Dataset.from_dict(columns) for name, columns in parts.items()}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "saved")
    assert str(caught.value) == message


def test_splits_with_columns_of_different_types_are_told(tmp_path):
    saved = DatasetDict({"train": Dataset.from_dict({"q": ["a"]}), "test": Dataset.from_dict({"q": [1]})})
    saved.save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved: the splits of the saved data set differ in their columns"):
        read(tmp_path / "saved")


def test_other_folders_are_told(tmp_path):
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: the folder is no saved data set\n"
        "  expected: what `datasets` writes with save_to_disk (state.json or dataset_dict.json)\n"
        "  fix: name a file in it instead"
    )
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="the saved data set cannot be read: "):
        read(tmp_path)
