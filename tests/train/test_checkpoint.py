"""Checkpoints: whole or not at all, refused when damaged; and training that goes on from them bit by bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.train.scarce import small_net, train_net
from torch import nn

from brim.config import load_config
from brim.errors import CheckpointError
from brim.train import build_optimizer
from brim.train.checkpoints import CheckpointStore, optimizer_state, restore_optimizer, restore_weights, trained_weights


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


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path)


def test_the_newest_two_and_the_best_are_kept_and_foreign_folders_stay(store, tmp_path):
    assert store.load_newest() == (None, [])
    (tmp_path / ".step-00000007.tmp").mkdir()  # what a killed save left goes with the next one
    (tmp_path / "step-00000008 (copy)").mkdir()
    for step, best in [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]:
        save(store, step, best)
    assert store.steps() == [2, 4, 5]
    assert len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "step-00000008 (copy)").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(store, tmp_path, name):
    for damage in ("flip", "truncate", "delete"):
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
        checkpoint, (refused,) = store.load_newest()
        assert checkpoint.step == 1
        assert "the checkpoint of step 2 is damaged" in refused


def test_no_whole_checkpoint_the_folder_of_another_step_and_a_wrong_manifest_are_errors_that_name_each(store, tmp_path):
    save(store, 1)
    folder = tmp_path / "step-00000001"
    folder.rename(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 3 is damaged \(its state is that of another"):
        store.load(3)
    (tmp_path / "step-00000003").rename(folder)
    whole = json.loads((folder / "manifest.json").read_text())
    for name in ("../step-00000001/model.safetensors", "/etc/hostname"):
        (folder / "manifest.json").write_text(json.dumps({**whole, name: "0" * 64}))
        with pytest.raises(
            CheckpointError, match=rf"step 1 is damaged \(manifest.json names paths outside .*: {name}\)"
        ):
            store.load(1)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step 1 is damaged \(manifest.json names no model.safetensors, optim"):
        store.load(1)
    (folder / "state.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps(whole))
    words = r"no whole checkpoint is left: the checkpoint of step 1 is damaged \(state"
    with pytest.raises(CheckpointError, match=words):
        store.load_newest()


def test_a_save_that_fails_leaves_the_checkpoint_before_it_whole(store, tmp_path):
    save(store, 1)
    for step in (1, 2):  # in place of a damaged one, and after it
        with pytest.raises(CheckpointError, match=f"the checkpoint of step {step} could not be written"):
            store.save(step, tensors={"no/such/folder": {"w": torch.ones(1)}}, state={}, best_step=None)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert store.load_newest()[0].step == 1
    save(store, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_was_left_to_do_after_a_save_is_done(store, tmp_path):
    for step in (1, 2, 3):
        save(store, step, best_step=1)
    for name in ("step-00000002", "step-00000004", ".step-00000001.old", ".step-00000005.tmp"):
        (tmp_path / name).mkdir(exist_ok=True)
    store.tidy(3, best_step=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]


# A run's state as tensors, and back


def from_config(name, **keys):
    trainer = {"type": "finetune", "optimizer": {"type": name, **keys}}
    chosen = load_config({"base_model": "m", "adapter": "lora", "trainer": trainer}).config.trainer.optimizer
    return lambda parameters: build_optimizer(chosen, parameters)


OPTIMIZERS = {
    **{name: from_config(name) for name in ("adam", "adamw", "sgd", "adafactor", "lion")},
    "sgd with momentum": from_config("sgd", momentum=0.9),
    **{
        f"{name}_8bit": from_config(f"{name}_8bit", min_8bit_size=64)
        for name in ("adam", "adamw", "lion", "sgd", "rmsprop", "adagrad")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_by_bit_from_states_in_a_file(name, tmp_path):
    model, other = small_net(0), small_net(9)
    optimizer = OPTIMIZERS[name](model.parameters())
    train_net(model, optimizer, steps=3, seed=1)
    tensors, numbers = optimizer_state(optimizer)
    save_file(tensors, tmp_path / "optimizer.safetensors")
    numbers = json.loads(json.dumps(numbers))
    restore_weights(other, {key: value.clone() for key, value in trained_weights(model).items()})
    continued = OPTIMIZERS[name](other.parameters())
    restore_optimizer(continued, load_file(tmp_path / "optimizer.safetensors"), numbers)
    train_net(model, optimizer, steps=3, seed=2)
    train_net(other, continued, steps=3, seed=2)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    ours, theirs = optimizer_state(optimizer), optimizer_state(continued)
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(tensor, theirs[0][key]) for key, tensor in ours[0].items())


def test_frozen_weights_are_left_out_and_tied_ones_stand_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert list(trained_weights(model)) == ["0.weight"]
