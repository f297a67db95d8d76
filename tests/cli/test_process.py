"""The installed command, as a shell runs it."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

BRIM = Path(sys.executable).with_name("brim")


def run(*arguments):
    return subprocess.run(
        [BRIM, *map(str, arguments)], capture_output=True, text=True, encoding="utf-8", timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "config.yaml", "trainer.epoch=3"],
            "brim: override trainer.epoch=3: unknown key trainer.epoch\n  fix: did you mean trainer.epochs?\n",
        ),
        (
            ["check", "config.yaml", "base_model=sums.jsonl"],
            "brim: base_model is a file, not a folder: sums.jsonl\n  fix: name the folder that holds it\n",
        ),
        (
            ["train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "taken"],
            "brim: taken: the output directory holds other things; nothing was changed\n"
            "  expected: a new or an empty folder\n"
            "  fix: choose another with --output-directory\n",
        ),
    ],
)
def test_the_users_mistake_is_exit_code_2_and_one_message(project, arguments, message):
    (project / "taken").mkdir()
    (project / "taken" / "notes.txt").write_text("mine")
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert (project / "taken" / "notes.txt").read_text() == "mine"


def test_python_runs_the_command_as_a_module(project):
    command = [sys.executable, "-m", "brim"]
    for arguments, code in ((["schema"], 0), (["check", "config.yaml", "trainer.epoch=3"], 2)):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, run(*arguments).stdout, run(*arguments).stderr)


def test_the_version_is_printed_without_torch():
    probe = "import sys; sys.argv = ['brim', '--version']; from brim.cli import main\ntry: main()\n"
    probe += "except SystemExit as leaving: print(leaving.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"brim {version('brim')}\n0 False\n"


def test_check_shows_samples_and_needs_no_torch(project):
    done = run("check", "config.yaml", "--dataset", "sums.jsonl", "--show", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "add 0 and 0 =« 0<|end|>»" in done.stdout
    assert "«…»: what the model learns to write" in done.stdout


def test_a_reader_that_goes_away_is_no_traceback():
    """As in `brim schema | head -1`."""
    process = subprocess.Popen([BRIM, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


def test_the_schema_is_json():
    assert json.loads(run("schema").stdout)["properties"]["base_model"]


@pytest.mark.parametrize(
    "error",
    [
        "type('OutOfMemoryError', (RuntimeError,), {})('CUDA')",  # as torch.OutOfMemoryError
        'RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can\'t allocate memory: 4 bytes")',
        "RuntimeError('CUDA error: out of memory')",
        "MemoryError()",
    ],
)
def test_memory_that_is_used_up_is_one_message(error):
    code = f"import brim.cli.app as a, brim.cli.command as m\ndef run(arguments): raise {error}\na.run = run\nm.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "brim: the memory of the device, or of the machine, is used up\n"
        "  fix: free memory, load the base in fewer bits (quantization.bits: 4), or cut rows with "
        "preprocessing.global_max_sequence_length; `brim memory` says what takes how much\n"
    )


def test_other_errors_of_the_program_are_not_hidden():
    failing = "def run(arguments): raise RuntimeError('odd')"
    code = f"import brim.cli.app as a, brim.cli.command as m\n{failing}\na.run = run\nm.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "RuntimeError: odd" in done.stderr
