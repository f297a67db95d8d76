"""`brim predict` as a job: stopped, gone on with, and what is refused."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from brim.infer import Journal

ZERO_SHOT = ("adapter=null", "trainer={type: none, batch_size: 4}")


@pytest.fixture
def predict(brim, project):
    """predict("--resume", …): of sums.jsonl to out.csv, zero-shot."""
    return lambda *more: brim(
        "predict", "config.yaml", *ZERO_SHOT, "--dataset", "sums.jsonl", "--output", "out.csv", *more
    )


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C, once some responses are written."""
    append = Journal.append

    def then_ctrl_c(self, records):
        append(self, records)
        if len(self) >= 8:
            raise KeyboardInterrupt

    def command(run):
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "append", then_ctrl_c)
            return run()

    return command


def test_ctrl_c_says_how_to_go_on_and_resume_does(predict, interrupted, project):
    whole = predict()
    assert whole.code == 0
    expected = (project / "out.csv").read_bytes()
    (project / "out.csv").unlink()
    done = interrupted(predict)
    assert done.code == 130
    assert "\nbrim: out.csv: stopped after " in done.err
    assert done.err.endswith(f"  fix: continue with `{shlex.join(['brim', *sys.argv[1:]])} --resume`\n")
    refused = predict()
    assert refused.code == 2
    assert "a prediction to this output was begun and not finished; nothing was changed" in refused.err
    again = predict("--resume", "--json")
    assert again.code == 0
    assert "continuing: " in again.err
    assert (project / "out.csv").read_bytes() == expected
    told = json.loads(again.out)
    assert (told["num_rows"], told["output"], told["summary"]) == (40, "out.csv", "out.csv.summary.json")
    summary = json.loads((project / "out.csv.summary.json").read_text())
    assert (summary["num_resumed"], summary["num_killed"], summary["num_rows"]) == (1, 0, 40)


def test_scores_and_keys_are_options(predict, project):
    rows = [{**json.loads(line), "id": n} for n, line in enumerate(Path("sums.jsonl").read_text().splitlines())]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert predict("--scores", "--key", "id").code == 0
    assert (project / "out.csv").read_text().splitlines()[0].endswith(',"log_probability"')


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--on-error", "ignore"), "--on-error: 'ignore' is not known\n  expected: stop, skip\n"),
        (("--on-overlong", "drop"), "--on-overlong: 'drop' is not known\n  expected: error, truncate_left, skip\n"),
        (("--key", "id"), "sums.jsonl: there is no column `id` to know rows by\n"),
        (("--key", "split"), "a value in `split` that an earlier row has, too: '0' stands in sums.jsonl:1 first\n"),
        (("generation.max_new_tokens=128",), "generation.max_new_tokens leaves no room for a prompt: it is 128, the "),
    ],
)
def test_what_cannot_be_is_one_message_and_leaves_nothing(predict, project, digests, more, says):
    before = digests(project)
    done = predict(*more)
    assert done.code == 2
    assert says in done.err
    assert digests(project) == before


@pytest.mark.parametrize("kind", ["a link", "a folder of somebody's"])
def test_nothing_is_written_where_a_job_cannot_be(predict, project, kind):
    outside = project / "outside"
    outside.mkdir()
    (outside / "theirs.txt").write_text("precious")
    job = project / ".out.csv.job"
    if kind == "a link":
        (outside / "theirs.txt").unlink()
        job.symlink_to(outside)
    else:
        outside.rename(job)
    done = predict("--resume")
    assert done.code == 2
    assert "the folder for what is needed to go on holds other things; nothing was changed" in done.err
    assert sum(path.is_file() for path in job.rglob("*")) == (kind != "a link")


def test_a_prediction_without_a_data_set_names_the_one_that_it_takes(brim, project):
    """The configuration's own, of which the larger part trains."""
    own = ("predict", "config.yaml", "dataset=sums.jsonl", "--output")
    told = "no data set was named (--dataset, in Python dataset=…): {} of sums.jsonl are predicted, {}"
    whole = told.format("40 rows", "all splits of the configuration's own data, those that it trains on among them")
    assert brim(*own, "whole.csv").err.splitlines()[0].strip() == whole
    test = told.format("8 rows", "the split test of the configuration's own data")
    assert brim(*own, "test.csv", "--split", "test").err.splitlines()[0].strip() == test
    assert whole in " ".join(brim("predict", "config.yaml", "dataset=sums.jsonl", "--plan").err.split())
    named = brim("predict", "config.yaml", "--dataset", "sums.jsonl", "--output", "named.csv")
    assert (named.code, "no data set was named" in named.err) == (0, False)
