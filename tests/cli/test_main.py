"""What the command does around a verb: what it switches off, refuses, and shows of its own mistakes."""

from __future__ import annotations

import json
import os
import sys

import pytest

import brim.cli.app
import brim.cli.command
from brim.cli import main
from brim.errors import Problem
from brim.memory.allocator import AllocatorSettings
from brim.memory.allocator.settings import VARIABLES

SECRET = "a secret of no known shape"


@pytest.fixture
def run(monkeypatch, capfd):
    def run(*arguments, app=None):
        monkeypatch.setattr("sys.argv", ["brim", *arguments])
        if app is not None:
            monkeypatch.setattr(brim.cli.app, "run", app)
        with pytest.raises(SystemExit) as leaving:
            main()
        return leaving.value.code, capfd.readouterr().err

    return run


def test_libraries_do_nothing_unasked(run, monkeypatch):
    names = ("HF_HUB_DISABLE_TELEMETRY", "USE_HUB_KERNELS", "DISABLE_SAFETENSORS_CONVERSION")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    run("--help")
    assert [os.environ[name] for name in names] == ["1", "NO", "true"]
    monkeypatch.setenv("USE_HUB_KERNELS", "YES")
    run("--help")
    assert os.environ["USE_HUB_KERNELS"] == "YES"


def test_a_secret_on_the_command_line_is_refused_and_not_repeated(run, monkeypatch):
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    code, err = run("check", "config.yaml", "--dataset", f"/data/{SECRET}/rows.csv")
    assert code == 2
    assert err == (
        "brim: command line: argument 4 holds a secret that also stands in the environment\n"
        "  expected: no access tokens and no passwords\n"
        "  fix: take it out; what needs a token finds it in the environment (HF_TOKEN for the Hub)\n"
    )


def test_a_secret_in_the_current_folder_is_refused(run, monkeypatch, tmp_path):
    (tmp_path / SECRET).mkdir()
    monkeypatch.chdir(tmp_path / SECRET)
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    code, err = run("schema")
    assert code == 2
    assert "the path of the current folder holds a secret" in err
    assert SECRET not in err


def test_a_mistake_of_brims_shows_its_traceback_without_secrets(run, monkeypatch):
    monkeypatch.setenv("SOME_PASSWORD", SECRET)

    def app(arguments):
        raise KeyError(f"{SECRET}\x1b[31m")

    code, err = run("check", app=app)
    assert code == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert "KeyError: '***\\x1b[31m'" in err
    assert err.endswith("brim: this is a mistake of brim's own; please report it with the lines above\n")
    assert SECRET not in err


WRONG = {f"key_{number}": number for number in range(26)}
COMMANDS = {
    "check": ["check", "wrong.yaml"],
    "memory": ["memory", "wrong.yaml"],
    "plan": ["plan", "wrong.yaml", "--dataset", "rows.csv"],
    "train": ["train", "wrong.yaml", "--dataset", "rows.csv"],
    "verify-resume": ["verify-resume", "nowhere"],
    "compare": ["compare", "wrong.yaml", "wrong.yaml", "--dataset", "rows.csv", "--output-directory", "out"],
    "evaluate": ["evaluate", "wrong.yaml", "--dataset", "rows.csv"],
    "predict": ["predict", "wrong.yaml", "--dataset", "rows.csv", "--output", "out.csv"],
    "embed": ["embed", "wrong.yaml", "--dataset", "rows.csv", "--output", "out.parquet"],
    "export": ["export", "nowhere", "--output", "out"],
    "upload": ["upload", "nowhere", "me/model"],
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_tells_all_that_is_wrong_as_lines_or_as_json(monkeypatch, tmp_path, capfd, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text(json.dumps({"base_model": "m", **WRONG}))
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    told = []
    for options in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["brim", *COMMANDS[verb], *options])
        with pytest.raises(SystemExit) as leaving:
            main()
        assert leaving.value.code == 2
        told.append(capfd.readouterr())
    lines, as_json = told
    assert (lines.out, as_json.err) == ("", "")
    error = json.loads(as_json.out)["error"]
    assert error["exit_code"] == 2
    assert [problem.keys() for problem in error["problems"]] == [{"what", "where", "expected", "fix"}] * (
        26 if "wrong.yaml" in COMMANDS[verb] else 1
    )
    assert lines.err == "brim: " + "".join(f"{Problem(**problem)}\n" for problem in error["problems"])


def test_with_json_a_full_disk_is_json_too(run, monkeypatch, capfd):
    def app(arguments):
        raise OSError(28, "No space left on device", "out.csv")

    monkeypatch.setattr("sys.argv", ["brim", "check", "--json"])
    monkeypatch.setattr(brim.cli.app, "run", app)
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 1
    error = json.loads(capfd.readouterr().out)["error"]
    assert (error["kind"], error["problems"][0]["what"]) == ("OSError", "[Errno 28] No space left on device: 'out.csv'")


def test_every_verb_with_json_is_among_those():
    with_json = {command.name for command in brim.cli.app.app.registered_commands if "as_json" in _options(command)}
    assert with_json == set(COMMANDS)


def _options(command):
    return command.callback.__code__.co_varnames


@pytest.mark.parametrize(
    ("has_driver", "given", "settings"),
    [
        (True, {}, AllocatorSettings(expandable_segments=True)),
        (False, {}, AllocatorSettings()),
        (True, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, AllocatorSettings()),
        (True, {"PYTORCH_CUDA_ALLOC_CONF": ""}, AllocatorSettings()),
    ],
)
def test_segments_grow_on_a_gpu_unless_the_user_says_how(monkeypatch, tmp_path, has_driver, given, settings):
    environment = dict(given)
    monkeypatch.setattr(brim.cli.command, "_NVIDIA_DRIVER", tmp_path if has_driver else tmp_path / "none")
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["brim", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert AllocatorSettings.from_environment(environment) == settings
    assert set(brim.cli.command._ALLOCATOR) == set(VARIABLES)
