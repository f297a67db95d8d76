"""What tests share: the gallery holds what its recipes promise, and a golden file is compared to the letter."""

import pytest
from tests.gallery import RECIPES
from tests.golden import Golden


def steps(piece):
    return [record for record in piece.log if record.get("split") == "train" and "event" not in record]


@pytest.mark.parametrize("name", RECIPES)
def test_each_run_is_what_its_name_says(gallery, name):
    piece = gallery(name)
    events = {record["event"] for record in piece.log if "event" in record}
    assert ("oom" in events) == (name == "replayed")
    assert (piece.run / "model" / "manifest.json").exists() == (name != "stopped")
    assert (piece.run / "model" / "adapter_model.safetensors").exists() == (name not in ("full", "chat", "stopped"))
    sizes = {"chat": [8, 8, 2] * 6, "stopped": [8] * 3}
    assert [step["effective_batch_size"] for step in steps(piece)] == sizes.get(name, [8, 8, 8, 4] * 2)


def test_a_golden_file_is_written_and_compared(tmp_path):
    with pytest.raises(AssertionError, match=r"a/table.txt: no such golden file"):
        Golden(write=False, folder=tmp_path)("a/table.txt", "x\n")
    Golden(write=True, folder=tmp_path)("a/table.txt", "rows  3  \n")
    Golden(write=False, folder=tmp_path)("a/table.txt", "rows  3\n")
    with pytest.raises(AssertionError, match=r"differs from tests/golden/a/table.txt"):
        Golden(write=False, folder=tmp_path)("a/table.txt", "rows  4\n")
