"""Checkpoints: whole or not at all, refused when damaged."""

import json

import pytest
import torch

from brim.errors import CheckpointError
from brim.train import CheckpointStore


def save(store, step, best_step=None):
    store.save(
        step,
        tensors={
            "model": {"w": torch.full((3,), float(step))},
            "optimizer": {},
            "random": {"cpu": torch.get_rng_state()},
        },
        state={"train": {"step": step}},
        best_step=best_step,
    )


def test_what_is_saved_is_loaded(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 7)
    checkpoint, refused = store.load_newest()
    assert refused == []
    assert checkpoint.step == 7
    assert checkpoint.state == {"train": {"step": 7}}
    assert checkpoint.tensors["model"]["w"].tolist() == [7.0, 7.0, 7.0]
    assert checkpoint.tensors["optimizer"] == {}
    assert torch.equal(checkpoint.tensors["random"]["cpu"], torch.get_rng_state())


def test_only_safetensors_and_json_are_written(tmp_path):
    save(CheckpointStore(tmp_path), 1)
    names = sorted(path.name for path in (tmp_path / "step-00000001").iterdir())
    assert names == ["manifest.json", "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    for step, best in [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]:
        save(store, step, best)
    assert store.steps() == [2, 4, 5]


def test_what_a_killed_save_left_goes_with_the_next_one_and_foreign_folders_stay(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / ".step-00000007.tmp").mkdir()
    (tmp_path / "step-00000008 (copy)").mkdir()
    save(store, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008 (copy)", "step-00000009"]
    assert store.steps() == [9]


def test_there_is_nothing_to_load_in_a_new_folder(tmp_path):
    assert CheckpointStore(tmp_path).load_newest() == (None, [])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(tmp_path, name, damage):
    store = CheckpointStore(tmp_path)
    save(store, 1, best_step=1)
    save(store, 2, best_step=1)
    file = tmp_path / "step-00000002" / name
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    checkpoint, refused = store.load_newest()
    assert checkpoint.step == 1
    assert len(refused) == 1
    assert "the checkpoint of step 2 is damaged" in refused[0]


def test_no_whole_checkpoint_is_an_error_that_names_each(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "step-00000001" / "state.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"no whole checkpoint is left: the checkpoint of step 1 is damaged \(state"
    ):
        store.load_newest()


def test_a_save_that_fails_leaves_the_checkpoint_before_it_whole(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 could not be written"):
        store.save(2, tensors={"no/such/folder": {"w": torch.ones(1)}}, state={}, best_step=None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert store.load_newest()[0].step == 1


def test_the_manifest_has_a_digest_for_every_other_file(tmp_path):
    save(CheckpointStore(tmp_path), 1)
    folder = tmp_path / "step-00000001"
    digests = json.loads((folder / "manifest.json").read_text())
    assert {*digests, "manifest.json"} == {path.name for path in folder.iterdir()}
    assert all(len(digest) == 64 for digest in digests.values())


def test_a_manifest_that_leaves_files_out_is_damage(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"step 1 is damaged \(manifest.json names no model.safetensors, optimizer"
    ):
        store.load(1)


@pytest.mark.parametrize("name", ["../step-00000001/model.safetensors", "/etc/hostname"])
def test_a_manifest_that_names_what_lies_outside_is_refused_and_the_one_before_is_taken(tmp_path, name):
    store = CheckpointStore(tmp_path)
    save(store, 1, best_step=1)
    save(store, 2, best_step=1)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), name: "0" * 64}))
    checkpoint, refused = store.load_newest()
    assert checkpoint.step == 1
    assert refused == [
        f"the checkpoint of step 2 is damaged (manifest.json names what lies outside the folder: {name})"
    ]


def test_the_folder_of_another_step_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 3 is damaged \(its state is that of another"):
        store.load(3)


def test_a_save_in_place_of_a_damaged_one_that_fails_leaves_that_one(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match="could not be written"):
        store.save(1, tensors={"no/such/folder": {"w": torch.ones(1)}}, state={}, best_step=None)
    assert store.load(1).step == 1
    save(store, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_was_left_to_do_after_a_save_is_done(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step, best_step=1)
    for name in ("step-00000002", "step-00000004", ".step-00000001.old", ".step-00000005.tmp"):
        (tmp_path / name).mkdir(exist_ok=True)
    store.tidy(3, best_step=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]
