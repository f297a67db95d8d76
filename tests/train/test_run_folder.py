"""The folder of a run: taken, free, or in use."""

import subprocess
import sys

import pytest

from brim.errors import CheckpointError, InputError, OutputError
from brim.storage import write_manifest
from brim.train import RunFolder, check_run_folder, create_run_folder, held, open_run_folder, require_whole_model

HOLD = """
import sys
from pathlib import Path
from brim.train import RunFolder; from brim.train import held
with held(RunFolder(Path(sys.argv[1])), resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    run = create_run_folder(tmp_path / "run", resume=False)
    command = [sys.executable, "-c", HOLD, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        message = "another process is training in this folder; nothing was changed"
        with pytest.raises(OutputError, match=message), held(run, resume=True):
            pytest.fail("held twice")
        other.kill()
    with held(run, resume=False):  # a killed process lets go
        pass


def test_a_run_that_began_in_the_meantime_is_seen(tmp_path):
    run = create_run_folder(tmp_path / "run", resume=False)
    run.plan.write_text("{}")
    with pytest.raises(OutputError, match="there is a run in this folder already"), held(run, resume=False):
        pytest.fail("not seen")


def test_what_a_kill_in_the_first_moments_left_blocks_nothing(tmp_path):
    (tmp_path / ".plan.json.tmp").touch()
    (tmp_path / ".brim-can-write").touch()
    check_run_folder(tmp_path, resume=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OutputError, match="the output directory holds other things"):
        check_run_folder(tmp_path, resume=False)


def model_of(run):
    run.model.mkdir(parents=True)
    run.config.write_text("")
    run.plan.write_text("{}")
    (run.model / "adapter.safetensors").write_text("weights")
    write_manifest(run.model)
    return run


def test_a_model_that_a_kill_left_aside_is_put_back_when_the_run_is_opened(tmp_path):
    run = model_of(RunFolder(tmp_path / "run"))
    run.model.rename(run.path / ".model.old")
    assert (open_run_folder(run.path).model / "adapter.safetensors").read_text() == "weights"
    assert not (run.path / ".model.old").exists()


def test_a_model_that_is_just_being_replaced_is_left_to_who_does_it(tmp_path):
    run = model_of(RunFolder(tmp_path / "run"))
    run.model.rename(run.path / ".model.old")
    with held(run, resume=True), pytest.raises(InputError, match="this run has no model yet"):
        open_run_folder(run.path)
    assert (run.path / ".model.old").exists()


def test_a_changed_file_of_the_model_is_named_with_what_to_do(tmp_path):
    run = model_of(RunFolder(tmp_path / "run"))
    require_whole_model(run)
    (run.model / "adapter.safetensors").write_text("Weights")
    with pytest.raises(CheckpointError) as caught:
        require_whole_model(run)
    assert str(caught.value) == (
        f"{run.model}: the model of this run is damaged (adapter.safetensors changed since it was written)\n"
        "  expected: the files that its manifest.json lists\n"
        f"  fix: write it anew with `brim train {run.path} --resume`; delete manifest.json if you changed the model "
        "yourself"
    )
    (run.model / "manifest.json").unlink()
    require_whole_model(run)


def test_a_file_that_was_put_into_the_model_is_told(tmp_path):
    run = model_of(RunFolder(tmp_path / "run"))
    (run.model / ".DS_Store").write_text("of a file manager")
    require_whole_model(run)
    (run.model / "chat_template.jinja").write_text("other prompts")
    with pytest.raises(CheckpointError, match=r"damaged \(chat_template.jinja came from elsewhere\)"):
        require_whole_model(run)
    (run.model / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors, chat_template\.jinja came"):
        require_whole_model(run)


def test_a_run_without_its_plan_is_known_by_its_checkpoints(tmp_path):
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    assert not run.is_run
    (run.checkpoints / "step-00000004" / "manifest.json").write_text("{}")
    assert run.is_run
    check_run_folder(run.path, resume=True)
