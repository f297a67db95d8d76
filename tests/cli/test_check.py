"""`brim check`: what it says about the data, in 80 columns and as JSON."""

import json
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from brim.cli.check import histogram_lines
from brim.data.advice import Bin

PREDICTING = """\
model_type: llm
base_model: {base}
input_features: [{{name: dialogue, type: text, preprocessing: {{max_sequence_length: 100}}}}]
output_features: [{{name: summary, type: text, preprocessing: {{max_sequence_length: 20}}}}]
prompt: {{template: "Summarize this dialogue:\\n### Dialogue: {{dialogue}}\\n### Synopsis:"}}
generation: {{temperature: 0.1, max_new_tokens: 20}}
preprocessing: {{split: {{type: fixed}}}}
trainer: {{type: none}}
"""


@pytest.fixture
def leaking(project):
    """40 rows to train on, of which two stand in the test split, too, and one asks what another asks."""
    rows = [{"question": f"add {n} and {n} =", "answer": f" {2 * n}", "split": 0} for n in range(40)]
    rows += [{"question": f"add {n} and {n + 1} =", "answer": f" {2 * n + 1}", "split": 1} for n in range(30)]
    rows += [{"question": f"add {n} and {n + 2} =", "answer": f" {2 * n + 2}", "split": 2} for n in range(38)]
    rows += [{**rows[3], "split": 2}, {**rows[5], "answer": " 7", "split": 2}, {**rows[7], "answer": " 1"}]
    (project / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return project


def test_advice_is_numbered_wrapped_and_placed(brim, leaking):
    done = brim("check", "config.yaml", "--dataset", "sums.jsonl")
    assert (done.code, done.err) == (0, "")
    told = done.out.split("advice (")[1].splitlines()[1:]
    assert told == [
        " 1. 2 of 40 test rows (5.0%) have a prompt that stands in train (1 with the same",
        "    answer)",
        "    → take these rows out (`brim check … --rows FILE` lists them), or set",
        "      preprocessing.split: {type: hash, column: question}",
        "    sums.jsonl:109 (as 4), 110 (as 6)",
        " 2. 2 of 41 rows (4.9%) ask the same as another and are answered differently (1",
        "    prompt)",
        "    → keep one answer a prompt, or add to the prompt what makes them differ",
        "    sums.jsonl:111 (as 8)",
    ]
    assert max(map(len, done.out.splitlines()[1:])) <= 80


def test_an_output_that_does_not_take_every_sign_gets_question_marks(leaking):
    command = [sys.executable, "-c", "from brim.cli import main; main()"]
    done = subprocess.run(
        [*command, "check", "config.yaml", "--dataset", "sums.jsonl", "--show", "1"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        encoding="latin-1",
        check=True,
    )
    assert done.stderr == ""
    assert "    ? keep one answer a prompt" in done.stdout


def test_no_advice_is_one_line(brim, project):
    rows = [{"question": f"add {n} and {n} =", "answer": f" {2 * n}", "split": 0} for n in range(40)]
    (project / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = brim("check", "config.yaml", "--dataset", "plain.jsonl")
    assert done.out.endswith("\nadvice: none\n")


def test_json_has_every_row(brim, leaking):
    told = json.loads(brim("check", "config.yaml", "--dataset", "sums.jsonl", "--json").out)["data"]
    assert told["advice"][0] == {
        "kind": "leakage",
        "what": "2 of 40 test rows (5.0%) have a prompt that stands in train (1 with the same answer)",
        "why": "a model that has seen the answers scores better there than on new prompts",
        "fix": told["advice"][0]["fix"],
        "num_rows": 2,
        "rows": [108, 109],
        "like": [3, 5],
        "places": ["sums.jsonl:109 (as sums.jsonl:4)", "sums.jsonl:110 (as sums.jsonl:6)"],
    }
    assert told["advice"][1]["rows"] == [7, 110]
    assert told["cuts"] == []
    assert sum(each["num_rows"] for each in told["lengths"]) == 111


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_rows_go_to_a_file(brim, leaking, ending):
    file = f"rows.{ending}"
    done = brim("check", "config.yaml", "--dataset", "sums.jsonl", "--rows", file)
    assert done.code == 0
    readers = {"csv": pd.read_csv, "jsonl": lambda path: pd.read_json(path, lines=True), "parquet": pd.read_parquet}
    frame = readers[ending](leaking / file)
    assert frame.to_dict("list") == {
        "advice": ["leakage", "leakage", "different_answers"],
        "row": [108, 109, 110],
        "place": ["sums.jsonl:109", "sums.jsonl:110", "sums.jsonl:111"],
        "like_row": [3, 5, 7],
        "like_place": ["sums.jsonl:4", "sums.jsonl:6", "sums.jsonl:8"],
    }
    again = brim("check", "config.yaml", "--dataset", "sums.jsonl", "--rows", file)
    assert again.code == 2
    assert "the output file exists already; nothing was changed" in again.err


def test_the_cut_is_told_once(brim, project):
    rows = [{"question": f"add {n} =", "answer": f" {n}" * (1 + 8 * (n == 3)), "split": 0} for n in range(40)]
    (project / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = brim("check", "config.yaml", "--dataset", "long.jsonl", "preprocessing.global_max_sequence_length=10")
    assert "were cut as a whole" not in done.out
    assert " 1. 1 of 40 rows (2.5%) are cut at 10 tokens; " in done.out
    assert "    → set preprocessing.global_max_sequence_length: " in done.out
    assert "\n    long.jsonl:4\n" in done.out


def test_prompts_alone_are_checked_where_nothing_is_trained(brim, project, tiny_base):
    (project / "predict.yaml").write_text(PREDICTING.format(base=tiny_base))
    (project / "dialogues.csv").write_text("dialogue\n" + "".join(f"hello number {n}\n" for n in range(20)))
    done = brim("check", "predict.yaml", "--dataset", "dialogues.csv")
    assert (done.code, done.err) == (0, "")
    assert "the data has no column `summary`: the prompts alone were checked, as for predict" in " ".join(
        done.out.split()
    )
    assert max(map(len, done.out.splitlines()[1:])) <= 80
    assert re.search(r"^full +20 ", done.out, flags=re.MULTILINE)
    assert "advice: none\n" in done.out


def test_what_the_data_says_does_not_steer_the_terminal(brim, project):
    (project / "odd.jsonl").write_text('{"question": "a\\u001b[31m\\tb", "answer": "c\\u202e", "split": 0}\n')
    done = brim("check", "config.yaml", "--dataset", "odd.jsonl", "--show", "1")
    assert "a\\x1b[31m" in done.out
    assert "«c\\u202e" in done.out
    assert not {"\x1b", "\u202e"} & set(done.out)


def test_rows_without_data_is_told(brim, project):
    done = brim("check", "config.yaml", "--rows", "rows.csv")
    assert done.code == 2
    assert "--rows writes about data, and none was given" in done.err


def test_a_histogram_is_aligned_and_its_fullest_bin_is_as_wide_as_it_may_be():
    bins = [Bin(first=1, last=8, num_rows=2), Bin(first=9, last=16, num_rows=1000), Bin(first=17, last=20, num_rows=0)]
    assert list(histogram_lines(bins, title="tokens", width=30)) == [
        "tokens   rows",
        "   1–8      2  █",
        "  9–16  1,000  " + "█" * 15,
        " 17–20      0",
    ]
    assert list(histogram_lines(bins[:1], title="tokens", width=80)) == []


def test_check_tells_what_this_machine_lacks_and_train_then_stops_at_it(brim, project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    optimizer = "trainer.optimizer.type=paged_adamw"
    done = brim("check", "config.yaml", "--dataset", "sums.jsonl", optimizer)
    assert done.code == 0
    assert done.out.startswith("trainer.optimizer.type: paged_adamw needs a CUDA device, and there is none here: ")
    assert "config.yaml: the configuration is right, but not for this machine; llama with " in done.out
    (note,) = json.loads(brim("check", "config.yaml", optimizer, "--json").out)["notes"]
    assert note == done.out.splitlines()[0]
    stopped = brim("train", "config.yaml", "--dataset", "sums.jsonl", optimizer)
    assert stopped.code == 2
    assert "needs a CUDA device" in stopped.err


@pytest.mark.parametrize("verb", ["check", "memory", "plan", "train"])
def test_experts_with_dropout_are_told_before_data_is_read_and_a_model_built(brim, project, tiny_base, verb):
    """The rows are bad, too, and would be told by a verb that reads them."""
    folder = project / "mixtral"
    shutil.copytree(tiny_base, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "mixtral", "num_local_experts": 4}))
    (project / "rows.jsonl").write_text('{"question": 1}\n')
    data = () if verb == "memory" else ("--dataset", "rows.jsonl")
    done = brim(verb, "config.yaml", "base_model=mixtral", "adapter.target_modules=all-linear", *data)
    assert done.code == 2
    assert "adapter.dropout is 0.05, and experts are among the target modules" in done.err
    assert "set adapter.dropout: 0" in done.err
    assert ("answer" in done.err) == (verb == "check"), "which tells all at once"
