"""`brim export` and `brim upload` as the shell runs them."""

import json
import os
import subprocess
import sys

import pytest
from tests.api.fake_hub import fake_hub

TOKEN = "hf_" + "PlantedTokenOfNobody" + "0123456789abcd"


def test_export_says_what_it_wrote(brim, finished_run, tmp_path):
    done = brim("export", finished_run, "--output", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert done.out == f"adapter, for PEFT: {tmp_path / 'out'} ({num_bytes:,} bytes)\n"


def test_a_merge_is_printed_with_its_figures(brim, finished_run, tmp_path):
    done = brim("export", finished_run, "--merge", "--output", tmp_path / "out")
    assert done.code == 0
    facts = json.loads((tmp_path / "out" / "export.json").read_text())["divergence"]
    assert f"merged and unmerged are {facts['mean_kl']:.2g} nats a token apart" in done.out
    assert "a fixed text, since the run's data was not at hand" in done.out
    as_json = brim("export", finished_run, "--merge", "--output", tmp_path / "again", "--json")
    told = json.loads(as_json.out)
    assert told["divergence"] == {key: facts[key] for key in told["divergence"]}
    assert (told["kind"], told["output"]) == ("merged", str(tmp_path / "again"))


def test_a_refused_merge_exits_with_1_and_writes_nothing(brim, finished_run, tmp_path):
    done = brim("export", finished_run, "--merge", "--max-divergence", "0", "--output", tmp_path / "out")
    assert done.code == 1
    assert "the merged model differs from the unmerged one by" in done.err
    assert "raise --max-divergence" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "onnx"], "brim does not write the format 'onnx'"),
        (["--merge", "--dtype", "int4"], "there is no dtype 'int4'\n  expected: bf16, fp16, fp32"),
        (["--merge", "--max-divergence", "-1"], "--max-divergence is -1"),
        (["--merge", "--max-divergence", "nan"], "--max-divergence is nan"),
        (["--dtype", "fp16"], "--dtype acts on merged weights, and nothing is merged"),
        (["--max-divergence", "1"], "--max-divergence acts on merged weights, and nothing is merged"),
        (["--merge", "--dataset", "no-such.jsonl"], "no such"),
        (["no.such.key=1"], "no"),
    ],
)
def test_wrong_options_exit_with_2(brim, finished_run, tmp_path, options, message):
    done = brim("export", finished_run, "--output", tmp_path / "out", *options)
    assert done.code == 2
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_finished_run_exits_with_2(brim, project, finished_run):
    for given, message in {
        "config.yaml": "there is nothing trained to hand on",
        "nowhere": "no such file or folder",
        ".": "this folder is not a run",
    }.items():
        done = brim("export", given, "--output", "out")
        assert done.code == 2
        assert message in done.err
        if given != "config.yaml":
            done = brim("upload", given, "some-org/some-model")
            assert done.code == 2


def test_an_unfinished_run_is_told_how_to_finish(brim, finished_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    for name in ("config.yaml", "plan.json"):
        (unfinished / name).write_bytes((finished_run / name).read_bytes())
    for command in (["export", unfinished, "--output", tmp_path / "out"], ["upload", unfinished, "some-org/x"]):
        done = brim(*command)
        assert done.code == 2
        assert "this run has no model yet" in done.err


def uploaded(run, home, url, *options, **environment):
    """`brim upload` in a process of its own, with nothing of this one's Hub settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [
        sys.executable,
        "-c",
        "from brim.cli import main; main()",
        "upload",
        str(run),
        "some-org/some-model",
    ]
    return subprocess.run([*command, *options], env={**inherited, **given}, capture_output=True, text=True, check=False)


def test_upload_shows_what_lies_on_the_hub_and_keeps_the_token_to_itself(finished_run, tmp_path):
    with fake_hub() as hub:
        done = uploaded(finished_run, tmp_path, hub.url, HF_DEBUG="1")
    files = hub.files["some-org/some-model", "main"]
    num_bytes = sum(map(len, files.values()))
    assert done.returncode == 0
    assert done.stdout == (
        f"8 files, {num_bytes:,} bytes, public: {', '.join(sorted(files))}\n"
        f"commit: {hub.url}/some-org/some-model/commit/1234\n"
    )
    assert hub.authorizations == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr
    assert TOKEN.encode() not in b"".join(hub.received)
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_refused_upload_is_one_message_without_the_token(finished_run, tmp_path):
    with fake_hub() as hub:
        hub.refuse["preupload"] = (403, f"{TOKEN} may not")
        done = uploaded(finished_run, tmp_path, hub.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "brim: some-org/some-model: the token in HF_TOKEN may not write to some-org/some-model (the Hub says: *** may "
        "not)\n  fix: use a token with the right to write, of a member of some-org\n"
    )
    assert hub.commits == []


def test_xet_which_sends_large_files_where_it_is_installed_logs_no_token(finished_run, tmp_path):
    pytest.importorskip("hf_xet")
    with fake_hub() as hub:  # which has no xet servers
        done = uploaded(finished_run, tmp_path, hub.url, HF_HUB_DISABLE_XET="0", HF_XET_LOG_LEVEL="trace")
    assert done.returncode == 1
    assert "the Hub could not be reached" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    logs = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert logs
    assert TOKEN.encode() not in b"".join(logs)
    assert hub.commits == []


def test_without_a_network_or_a_token_nothing_is_sent(finished_run, tmp_path):
    unreachable = uploaded(finished_run, tmp_path, "http://127.0.0.1:9")
    assert unreachable.returncode == 1
    assert "the Hub could not be reached" in unreachable.stderr
    with fake_hub() as hub:
        (tmp_path / "token").write_text(TOKEN)
        done = uploaded(finished_run, tmp_path, hub.url, HF_TOKEN="")
    assert done.returncode == 2
    assert "there is no token: HF_TOKEN is not set in the environment" in done.stderr
    assert hub.received == []


def test_there_is_no_option_for_a_token(brim, finished_run):
    done = brim("upload", finished_run, "some-org/some-model", "--token", TOKEN)
    assert done.code == 2
    assert TOKEN not in done.out + done.err
