"""What the campaign's judges see of a run folder."""

import json

import pytest
from faults.disk import lost_from
from faults.subject import digests, saved_step


def make_run(folder, *steps):
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(str(step))
    return folder


def logged(*steps):
    return "".join(json.dumps({"step": step, "event": "checkpoint"}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("shown", "log", "saved"),
    [
        ((), "", 0),
        ((2, 4), logged(2), 4),
        ((2,), logged(2, 4), 4),  # a checkpoint that is gone was saved all the same
        ((2,), logged(2) + logged(4)[:-4], 2),
    ],
)
def test_the_last_saved_step_is_known_by_names_and_by_the_log(tmp_path, shown, log, saved):
    make_run(tmp_path, *shown)
    (tmp_path / "metrics.jsonl").write_text(log)
    assert saved_step(tmp_path) == saved


def test_a_checkpoint_is_lost_unless_a_newer_one_is_there(tmp_path):
    before = digests(make_run(tmp_path / "before", 2, 4))
    assert lost_from(before, make_run(tmp_path / "same", 2, 4)) == ""
    assert lost_from(before, make_run(tmp_path / "newer", 4, 6)) == ""
    assert lost_from(before, make_run(tmp_path / "fewer", 4)) == "lost: checkpoints/step-00000002/state.json"
    changed = make_run(tmp_path / "changed", 2, 4, 6)
    (changed / "checkpoints" / "step-00000004" / "state.json").write_text("5")
    assert lost_from(before, changed) == "lost: checkpoints/step-00000004/state.json"
