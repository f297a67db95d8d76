"""What traces found, on disk."""

import json

import pytest

from brim.memory.trace import Work, WorkCount, WorkPlace
from brim.planning.costs import versions
from brim.planning.costs.traces import Basics, KnownShapes, ShapeCache
from brim.storage import sealed

FACTS = {"architecture": {"model_type": "llama"}, "target": None}
BASICS = Basics(
    static_bytes=9,
    state_bytes=1,
    unrecorded_bytes=2,
    first_update_bytes=3,
    update_bytes=4,
    load_bytes=5,
    chunk_positions=None,
)
PLACE = WorkPlace(phase="forward", layer=None, module="lm_head", operator="aten.mm", unit="matrix", dtype="bfloat16")


def known(**given):
    usual = {
        "basics": BASICS,
        "peaks_bytes": {(1, 2): 7, (3, 40): 90},
        "work": {(3, 40): WorkCount(places={PLACE: Work(6, 5, 4)})},
        "update_work": WorkCount(places={}),
        "overheads_bytes": {"3x40": 11},
    }
    return KnownShapes(**{**usual, **given})


def file_of(folder):
    (path,) = folder.rglob("*.json")
    return path


def test_what_is_written_is_read_again(tmp_path):
    ShapeCache(tmp_path, FACTS).write(known())
    assert ShapeCache(tmp_path, FACTS).read() == known()


def test_other_facts_are_another_file(tmp_path):
    ShapeCache(tmp_path, FACTS).write(known())
    assert ShapeCache(tmp_path, {**FACTS, "target": "t4"}).read() == KnownShapes()


def test_what_another_run_has_found_meanwhile_stays(tmp_path):
    one, other = ShapeCache(tmp_path, FACTS), ShapeCache(tmp_path, FACTS)
    one.write(KnownShapes(peaks_bytes={(1, 2): 7}))
    other.write(KnownShapes(peaks_bytes={(3, 4): 8}, overheads_bytes={"a": 1}))
    found = ShapeCache(tmp_path, FACTS).read()
    assert found == KnownShapes(peaks_bytes={(1, 2): 7, (3, 4): 8}, overheads_bytes={"a": 1})


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace('"static_bytes": 9', '"static_bytes": "9"'),
        lambda text: text.replace('"static_bytes"', '"other_bytes"'),
        lambda text: text.replace("90]", "90.5]"),
        lambda text: text.replace('"matrix", ', ""),
        lambda text: json.dumps({**json.loads(text), "overheads_bytes": [1]}),
        lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != "work"}),
    ],
)
def test_a_damaged_file_is_said_and_not_used(tmp_path, change):
    ShapeCache(tmp_path, FACTS).write(known())
    path = file_of(tmp_path)
    kept = json.dumps(json.loads(path.read_text())["value"])
    damaged = change(kept)
    assert damaged != kept
    path.write_text(sealed(damaged))
    cache = ShapeCache(tmp_path, FACTS)
    assert cache.read() == KnownShapes()
    assert cache.note == f"{path} is damaged, and is not used"
    cache.write(known())
    assert ShapeCache(tmp_path, FACTS).read() == known()


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    cache = ShapeCache(tmp_path / "file", FACTS)
    cache.write(known())
    assert cache.note is not None
    assert "kept" in cache.note or "cannot be read" in cache.note


def test_brims_own_source_is_part_of_the_versions():
    assert {"brim", "torch", "transformers", "peft", "bitsandbytes"} == set(versions())
    assert len(versions()["brim"]) == 32
