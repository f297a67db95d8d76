"""The folder of a run: taken, free, or in use."""

import subprocess
import sys

import pytest

from brim.errors import OutputError
from brim.train.run_folder import check_run_folder, create_run_folder, held

HOLD = """
import sys
from pathlib import Path
from brim.train.run_folder import RunFolder, held
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
