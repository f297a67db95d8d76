"""`brim check`: what it says about the data, in 80 columns and as JSON, and input that is odd but right."""

import json
import shutil

import pandas as pd
import pytest
from tests.cli.conftest import write

CHECK = ("check", "config.yaml", "--dataset")


@pytest.fixture
def leaking(project):
    """40 rows to train on, of which two stand in the test split, too, and one asks what another asks."""
    rows = [{"question": f"add {n} and {n} =", "answer": f" {2 * n}", "split": 0} for n in range(40)]
    rows += [{"question": f"add {n} and {n + 1} =", "answer": f" {2 * n + 1}", "split": 1} for n in range(30)]
    rows += [{"question": f"add {n} and {n + 2} =", "answer": f" {2 * n + 2}", "split": 2} for n in range(38)]
    rows += [{**rows[3], "split": 2}, {**rows[5], "answer": " 7", "split": 2}, {**rows[7], "answer": " 1"}]
    write(project / "sums.jsonl", rows)
    return project


def test_advice_is_numbered_wrapped_and_placed(brim, leaking, golden):
    done = brim(*CHECK, "sums.jsonl")
    assert (done.code, done.err) == (0, "")
    golden("cli/check_advice.txt", "advice (" + done.out.split("advice (")[1])
    assert max(map(len, done.out.splitlines()[1:])) <= 80
    told = json.loads(brim(*CHECK, "sums.jsonl", "--json").out)["data"]
    leakage, different = told["advice"]
    assert {key: value for key, value in leakage.items() if key not in ("fix", "why")} == {
        "kind": "leakage",
        "what": "2 of 40 test rows (5.0%) have a prompt that stands in train (1 with the same answer)",
        "num_rows": 2,
        "rows": [108, 109],
        "like": [3, 5],
        "places": ["sums.jsonl:109 (as sums.jsonl:4)", "sums.jsonl:110 (as sums.jsonl:6)"],
    }
    assert different["rows"] == [7, 110]
    assert told["cuts"] == []
    assert sum(each["num_rows"] for each in told["lengths"]) == 111


def test_rows_go_to_a_file(brim, leaking):
    assert brim(*CHECK, "sums.jsonl", "--rows", "rows.csv").code == 0
    assert pd.read_csv(leaking / "rows.csv").to_dict("list") == {
        "advice": ["leakage", "leakage", "different_answers"],
        "row": [108, 109, 110],
        "place": ["sums.jsonl:109", "sums.jsonl:110", "sums.jsonl:111"],
        "like_row": [3, 5, 7],
        "like_place": ["sums.jsonl:4", "sums.jsonl:6", "sums.jsonl:8"],
    }
    again = brim(*CHECK, "sums.jsonl", "--rows", "rows.csv", code=2)
    assert "the output file exists already; nothing was changed" in again.err


def test_no_advice_is_one_line_and_a_cut_is_told_once(brim, project):
    rows = [{"question": f"add {n} =", "answer": f" {n}", "split": 0} for n in range(40)]
    write(project / "plain.jsonl", rows)
    assert brim(*CHECK, "plain.jsonl").out.endswith("\nadvice: none\n")
    write(project / "long.jsonl", [*rows[:3], {**rows[3], "answer": " 3" * 9}, *rows[4:]])
    done = brim(*CHECK, "long.jsonl", "preprocessing.global_max_sequence_length=10")
    assert "were cut as a whole" not in done.out
    assert " 1. 1 of 40 rows (2.5%) are cut at 10 tokens; " in done.out
    assert "    → set preprocessing.global_max_sequence_length: " in done.out
    assert "\n    long.jsonl:4\n" in done.out


def test_what_the_data_says_is_shown_as_it_is_and_does_not_steer_the_terminal(brim, project):
    odd = {"question": "a\x1b[31m\tb", "answer": "c\u202e", "split": 0}
    write(project / "odd.jsonl", [odd, {"question": "[red]a[/red]", "answer": "[/]", "split": 0}])
    done = brim(*CHECK, "odd.jsonl", "--show", "2")
    assert "a\\x1b[31m" in done.out
    assert "«c\\u202e" in done.out
    assert not {"\x1b", "\u202e"} & set(done.out)
    assert "[red]a[/red]«[/]<|end|>»" in done.out


def test_check_tells_what_this_machine_lacks_and_train_then_stops_at_it(brim, project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    optimizer = "trainer.optimizer.type=paged_adamw"
    done = brim(*CHECK, "sums.jsonl", optimizer, code=0)
    assert done.out.startswith("trainer.optimizer.type: paged_adamw needs a CUDA device, and there is none here: ")
    assert "config.yaml: the configuration is right, but not for this machine; llama with " in done.out
    (note,) = json.loads(brim("check", "config.yaml", optimizer, "--json").out)["notes"]
    assert note == done.out.splitlines()[0]
    stopped = brim("train", "config.yaml", "--dataset", "sums.jsonl", optimizer, code=2)
    assert "needs a CUDA device" in stopped.err


def test_experts_with_dropout_are_told_before_data_is_read_and_a_model_built(brim, project, tiny_base):
    """The rows are bad, too, and would be told by a verb that reads them."""
    folder = shutil.copytree(tiny_base, project / "mixtral")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "mixtral", "num_local_experts": 4}))
    (project / "rows.jsonl").write_text('{"question": 1}\n')
    for verb in ("check", "memory", "plan", "train"):
        data = () if verb == "memory" else ("--dataset", "rows.jsonl")
        done = brim(verb, "config.yaml", "base_model=mixtral", "adapter.target_modules=all-linear", *data, code=2)
        assert "adapter.dropout is 0.05, and experts are among the target modules" in done.err
        assert "set adapter.dropout: 0" in done.err
        assert ("answer" in done.err) == (verb == "check"), "which tells all at once"


def test_data_files_may_have_odd_names_and_windows_line_ends(brim, project):
    names = ["my data.csv", "Zahlen – größer.csv", "a'b\"c.csv", "[bold].csv", "UPPER.CSV"]
    for number, name in enumerate(names):
        head = b"\xef\xbb\xbf" if number % 2 else b""
        (project / name).write_bytes(head + b"question,answer,split\r\nwhat,this,0\r\n")
        done = brim(*CHECK, name, "--show", "1")
        assert (done.code, done.err) == (0, "")
        assert f"\n{name}: 1 row\n" in done.out
        assert "what«this<|end|>»" in done.out
