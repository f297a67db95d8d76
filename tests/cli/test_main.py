"""What the command does around a verb: what it switches off, refuses, and shows of its own mistakes."""

from __future__ import annotations

import os

import pytest

import brim.cli.app
from brim.cli.main import main

SECRET = "a secret of no known shape"


@pytest.fixture
def run(monkeypatch, capfd):
    def run(*arguments, app=None):
        monkeypatch.setattr("sys.argv", ["brim", *arguments])
        if app is not None:
            monkeypatch.setattr(brim.cli.app, "app", app)
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

    def app():
        raise KeyError(f"{SECRET}\x1b[31m")

    code, err = run("check", app=app)
    assert code == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert "KeyError: '***\\x1b[31m'" in err
    assert err.endswith("brim: this is a mistake of brim's own; please report it with the lines above\n")
    assert SECRET not in err
