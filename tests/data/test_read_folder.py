"""Data sets of `datasets`, in folders and in memory."""

import json

import pytest
from datasets import Dataset, DatasetDict

from brim.data.read import read
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


def test_a_data_set_in_memory_is_read_with_its_selection_and_all_its_columns():
    whole = Dataset.from_dict({"q": ["x", "y", "z"], "n": [1, 2, 3]})
    chosen = whole.select([2, 0]).with_format("numpy", columns=["n"])
    source = read(chosen)
    assert source.table.to_pylist() == [{"q": "z", "n": 3}, {"q": "x", "n": 1}]
    assert source.locate(1) == "the data set, row 1"
    parts = DatasetDict({"train": whole.shuffle(seed=1), "test": whole.filter(lambda row: row["n"] == 2)})
    table = read(parts).table.to_pylist()
    assert [row["split"] for row in table] == [0, 0, 0, 2]
    assert [row["q"] for row in table] == [*parts["train"]["q"], "y"]
    with pytest.raises(DataError, match="the data set: splits of the data set have unknown names: more"):
        read(DatasetDict({"more": whole}))
    with pytest.raises(DataError, match=r"cannot be of the type IterableDataset(.|\n)*make a list of it"):
        read(whole.to_iterable_dataset())


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
            "saved: splits of the data set have unknown names: unsupervised\n"
            "  expected: train, validation, test\n"
            "  fix: keep only the splits to learn from, under these names",
        ),
        (
            {"train": {"q": ["a"], "split": [0]}},
            "saved: the data set has splits and also a column `split`\n  fix: rename the column",
        ),
        (
            {"val": {"q": ["a"]}, "validation": {"q": ["b"]}},
            "saved: the data set has the validation split twice: val, validation\n"
            "  fix: keep it under one of these names",
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
    with pytest.raises(DataError, match="saved: the splits of the data set differ in their columns"):
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


OTHERS = [{"filename": "../outside.arrow"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", {"_data_files": OTHERS}, "state.json does not name Arrow files of this folder"),
        ("state.json", {"_data_files": [{"filename": "/etc/passwd"}]}, "state.json does not name Arrow files"),
        ("state.json", {"_data_files": [{"filename": 3}]}, "state.json does not name Arrow files"),
        ("state.json", {"_data_files": 3}, "state.json does not name Arrow files"),
        ("state.json", {"_data_files": []}, "state.json does not name Arrow files"),
        ("state.json", {"_data_files": [{"filename": "no.arrow"}]}, "no.arrow is missing, or no regular file"),
        ("state.json", [], "state.json holds no mapping"),
        ("dataset_info.json", [], "dataset_info.json holds no mapping"),
        ("dataset_info.json", {"features": {"a": {"_type": "os.system"}}}, ""),
        ("dataset_dict.json", {"splits": ["../train"]}, "dataset_dict.json does not name the folders of its splits"),
        ("dataset_dict.json", {"splits": 3}, "dataset_dict.json does not name the folders of its splits"),
    ],
)
def test_what_the_small_files_may_not_say(tmp_path, name, content, message):
    folder = tmp_path / "saved"
    Dataset.from_dict({"q": ["a"], "a": ["b"]}).save_to_disk(folder)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"the saved data set cannot be read: {message}") as caught:
        read(folder)
    assert caught.value.problems[0].fix == "save it anew with save_to_disk"


def test_links_in_a_saved_folder_are_not_followed(tmp_path):
    folder = tmp_path / "saved"
    Dataset.from_dict({"q": ["a"], "a": ["b"]}).save_to_disk(folder)
    (file,) = folder.glob("*.arrow")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"\.arrow is missing, or no regular file"):
        read(folder)
