"""The table of mistakes in this process, the judge of bad input, what hypothesis draws of it, and the canaries."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shutil
import urllib.error
import urllib.request
from collections import Counter as Counted
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults.bad_configs import bad_configs
from faults.bad_data import bad_data
from faults.bad_input import BadInput, Edit, fault_of, state_of, touched
from faults.bad_models import bad_models, bad_runs
from faults.forked import Done
from faults.hostile import Counter, Hostile, cases, hub, trial
from faults.inputs import NUM_INPUTS, draw
from faults.mistakes import FLAGS, MISTAKES, USAGE
from faults.token import forms, found_in
from faults.workshop import DATA, build
from filelock import FileLock

from brim import Model
from brim.workflows.verify_resume import segment

COMMAND_LINES = {*FLAGS, *USAGE}
VERBS = sorted({bad.arguments[0] for bad in MISTAKES if bad.name not in COMMAND_LINES})
ENDED = Done(code=2, timed_out=False, seconds=0.1, cpu_s=0.1, peak_bytes=1 << 28, out="", err="")


@pytest.fixture(scope="module")
def project(shared_folder):
    """The workshop's project, whose run all workers share. Never written to."""
    folder = shared_folder / "workshop"
    with FileLock(f"{folder}.lock"):
        if not (folder / "run" / "model").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder, trained)
    return folder


def trained(*arguments, folder):
    """What `brim train` does, in this process."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        Model("config.yaml").train(DATA, output_directory="run", say=None)
    finally:
        os.chdir(here)
    return replace(ENDED, code=0)


@pytest.fixture
def in_process(brim, monkeypatch):
    """in_process("check", "config.yaml", folder=…): as faults.forked.Brim, without the child; it takes no time."""

    def run(*arguments, folder, **_):
        monkeypatch.chdir(folder)
        done = brim(*arguments)
        return replace(ENDED, code=done.code, out=done.out, err=done.err)

    return run


@pytest.fixture
def fault(in_process, project, tmp_path, monkeypatch):
    """fault(bad): what is wrong with the answer to it in a copy of the project; empty where nothing is."""

    def judge(bad):
        copy = tmp_path / "copy"
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(project, copy)
        for edit in bad.edits:
            edit.apply(copy)
        before = state_of(copy)
        monkeypatch.setattr(segment, "run_child", None)  # it is told before a process starts
        answer = in_process(*bad.arguments, folder=copy)
        return fault_of(bad, "check", answer, touched(before, state_of(copy)))

    return judge


@pytest.mark.run
@pytest.mark.parametrize("verb", VERBS)
def test_a_mistake_is_one_message_and_nothing_is_changed(fault, verb):
    judged = {bad.name: fault(bad) for bad in MISTAKES if bad.arguments[0] == verb and bad.name not in COMMAND_LINES}
    if any(judged.values()):
        pytest.fail("\n".join(f"{name}: {why}" for name, why in judged.items() if why))


@pytest.mark.run
def test_a_mistake_on_the_command_line_is_the_same_as_json(fault, brim):
    for bad in MISTAKES:
        if bad.name not in COMMAND_LINES:
            continue
        assert fault(bad) == "", bad.name
        if bad.name.endswith("--dataset"):
            continue  # whose value is --json, then
        lines, as_json = brim(*bad.arguments), brim(*bad.arguments, "--json")
        assert (as_json.code, as_json.err, lines.out) == (2, "", "")
        error = json.loads(as_json.out)["error"]
        assert (error["kind"], error["exit_code"]) == ("InputError", 2)
        (problem,) = error["problems"]
        assert problem["where"] == "command line"
        assert f"{problem['what']}\n" in lines.err
        assert f"  fix: {problem['fix']}\n" in lines.err or not problem["fix"]


def test_every_mistake_stands_once_in_the_table_and_says_words():
    assert max(Counted(bad.name for bad in MISTAKES).values()) == 1
    assert all(any(bad.words) for bad in MISTAKES)


BAD = BadInput(row="bad-configs", name="x", says=("config.yaml",), words=("is 'two'",), may_pass=("evaluate",))
GOOD_ANSWER = replace(
    ENDED, err="brim: config.yaml:3: trainer.epochs is\n  'two'\n  expected: a whole number of at least 1\n"
)


def judged(verb="check", left=(), **changes):
    return fault_of(BAD, verb, replace(GOOD_ANSWER, **changes), left)


def test_what_is_wrong_with_an_answer_is_seen():
    assert judged() == judged(err="trainer.epochs: 3 (why)\n" + GOOD_ANSWER.err) == ""
    assert judged(verb="evaluate", code=0) == "", "which need not notice"
    for changes, why in [
        ({"timed_out": True, "code": -9}, "still running after 0 s"),
        ({"code": 1, "err": "Traceback (most recent call last):\nKeyError: 3"}, "a traceback: KeyError: 3"),
        ({"out": "thread 'x' panicked at y"}, "a traceback:   expected: a whole number of at least 1"),
        ({"code": -11}, "ended by signal 11"),
        ({"cpu_s": 11.0}, "took 11 s"),
        ({"peak_bytes": 1 << 31}, "took 2048 MiB"),
        ({"code": 0}, "was accepted"),
        ({"code": 1}, "exit code 1: "),
        ({"err": "something"}, "no message: something"),
        ({"err": GOOD_ANSWER.err * 20}, "a message of 60 lines"),
        ({"err": GOOD_ANSWER.err + "x" * 1001}, "a line of 1001 characters"),
        ({"err": "brim: it is wrong\n  fix: mend it\n"}, "the place is not named: "),
        ({"err": "brim: config.yaml: it is wrong\n  fix: mend it\n"}, "[\"is 'two'\"] is not said: "),
        ({"err": "brim: config.yaml: it is 'two'\n"}, "no way out is named: "),
        ({"err": GOOD_ANSWER.err + "\x1b[31m"}, "control characters in the message: "),
        ({"left": ["new/plan.json", "new"]}, "left behind, or changed: new, new/plan.json"),
    ]:
        assert judged(**changes).startswith(why)


def test_every_edit_is_seen(tmp_path):
    for edit in [
        Edit(path="a/b", content=b"xyz"),
        *(Edit(path="a/c", how=how, target="b") for how in ("folder", "fifo", "link")),
        Edit(path="a/d", how="sparse"),
        Edit(path="a/b", how="cut", num_bytes=2),
        Edit(path="a/b", how="change", old=b"y", content=b"long"),
        Edit(path="a/b", how="remove"),
    ]:
        before = state_of(tmp_path)
        edit.apply(tmp_path)
        assert edit.path in touched(before, state_of(tmp_path))
        assert edit.how != "change" or (tmp_path / "a/b").read_bytes() == b"xlong"
    Edit(path="a/b", content=b"x").apply(tmp_path)
    with pytest.raises(ValueError, match="does not hold b'y'"):
        Edit(path="a/b", how="change", old=b"y").apply(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(bad_configs, "configurations"), (bad_data, "data"), (bad_models, "models"), (bad_runs, "runs")],
)
def test_enough_are_drawn_and_the_same_for_the_same_seed(strategy, kind):
    number = NUM_INPUTS[kind]
    assert len({bad.name for bad in draw(strategy(), number, 3)}) > 0.9 * number
    few, again = (draw(strategy(), number // 8, 3) for _ in range(2))
    assert [bad.name for bad in few] == [bad.name for bad in again]


# The canaries sing: code that is trusted runs and is seen, a Hub that is asked counts, planted tokens are found. Whether
# brim keeps them silent, the campaign tells.


@pytest.fixture
def own_project(project, tmp_path):
    """One whose surroundings may be written to."""
    (tmp_path / "outer").mkdir()
    return shutil.copytree(project, tmp_path / "outer" / "project")


@pytest.mark.run
def test_code_that_is_trusted_and_what_is_accepted_is_seen(in_process, own_project):
    (hostile,) = (each for each in cases(own_project) if each.bad.name == "auto_map, unknown model_type")
    trusting = replace(hostile, bad=replace(hostile.bad, overrides=("trust_remote_code=true",)))
    told = trial(trusting, "train", in_process, own_project, Counter(address=""))
    assert (told.outcome, told.why) == ("failed", "the folder's code ran")
    assert trial(hostile, "train", in_process, own_project, Counter(address="")).outcome == "passed"
    harmless = Hostile(bad=BadInput(row="hostile", name="nothing", says=("x",)))
    told = trial(harmless, "check", in_process, own_project, Counter(address=""))
    assert (told.outcome, told.why) == ("failed", "was accepted")
    inert = trial(replace(harmless, inert=True), "check", in_process, own_project, Counter(address=""))
    assert inert.outcome == "passed"


def asked(request):
    """The answer, which is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    caught.value.close()
    return caught.value


def test_a_hub_that_is_asked_counts():
    with hub() as counter:
        assert asked(f"{counter.address}/api/models/x").code == 404
        assert (counter.requests, counter.last) == (1, "/api/models/x")
    with hub(echo=True) as counter:
        request = urllib.request.Request(counter.address, headers={"Authorization": "Bearer xyz"})
        assert asked(request).headers["X-Error-Message"] == "Bearer xyz"


TOKENS = {"HF_TOKEN": "hf_" + "aB3" * 11 + "x", "OTHER": "a/b+c" * 5}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_are_found_in_every_form(name):
    token = TOKENS[name]
    hidden = [base64.b64encode(b"abc"[:offset] + token.encode() + b" and more") for offset in range(3)]
    for content in (
        token.encode(),
        *hidden,
        *(each.replace(b"+", b"-").replace(b"/", b"_") for each in hidden),
        token.encode().hex().encode(),
        token.encode("utf-16"),
        gzip.compress(b"x" + token.encode()),
        *forms(token),
    ):
        assert found_in(b"before " + content if not content.startswith(b"\x1f") else content, TOKENS) == name
    assert found_in(b"hf_ nothing " * 100, TOKENS) == ""


def test_tokens_are_found_in_parquet():
    for table in (
        pa.table({"a": ["x", f"y {TOKENS['OTHER']}"]}),
        pa.table({TOKENS["OTHER"]: [1]}),
        pa.table({"a": [1]}).replace_schema_metadata({"k": TOKENS["OTHER"]}),
    ):
        file = io.BytesIO()
        pq.write_table(table, file, compression="zstd")
        assert found_in(file.getvalue(), TOKENS) == "OTHER"
