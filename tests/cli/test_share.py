"""`brim export` and `brim upload` as the shell runs them; wrong options stand in faults/mistakes.py."""

import json
import os
import subprocess
import sys

import pytest
from tests.fake_hub import fake_hub

TOKEN = "hf_" + "PlantedTokenOfNobody" + "0123456789abcd"


def test_export_says_what_it_wrote_and_a_merge_its_figures(brim, finished_run, tmp_path):
    done = brim("export", finished_run, "--output", tmp_path / "adapter")
    assert (done.code, done.err) == (0, "")
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert done.out == f"adapter, for PEFT: {tmp_path / 'adapter'} ({num_bytes:,} bytes)\n"
    done = brim("export", finished_run, "--merge", "--output", tmp_path / "out", code=0)
    facts = json.loads((tmp_path / "out" / "export.json").read_text())["divergence"]
    assert f"merged and unmerged are {facts['mean_kl']:.2g} nats a token apart" in done.out
    told = json.loads(brim("export", finished_run, "--merge", "--output", tmp_path / "again", "--json").out)
    assert told["divergence"] == {key: facts[key] for key in told["divergence"]}
    assert (told["kind"], told["output"]) == ("merged", str(tmp_path / "again"))


def test_a_refused_merge_writes_nothing_and_an_upload_needs_a_model(brim, finished_run, tmp_path, monkeypatch):
    done = brim("export", finished_run, "--merge", "--max-divergence", "0", "--output", tmp_path / "out", code=1)
    assert "the merged model differs from the unmerged one by" in done.err
    assert "raise --max-divergence" in done.err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("config.yaml", "plan.json"):
        (tmp_path / name).write_bytes((finished_run / name).read_bytes())
    done = brim("upload", tmp_path, "some-org/x")
    assert (done.code, "this run has no model yet" in done.err) == (2, True)
    done = brim("upload", finished_run, "some-org/some-model", "--token", TOKEN, code=2)
    assert TOKEN not in done.out + done.err


# In a process of its own, with nothing of this one's Hub settings


def uploaded(run, home, url, *options, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", "from brim.cli import main; main()", "upload", str(run), "some-org/some-model"]
    return subprocess.run([*command, *options], env={**inherited, **given}, capture_output=True, text=True, check=False)


@pytest.mark.process
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


@pytest.mark.process
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
