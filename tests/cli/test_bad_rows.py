"""Bad and overlong rows in every verb: exit code 2 by default, or the job goes on and names them."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

DROP = "preprocessing.on_bad_row=drop"
BROKEN = "bad.jsonl:{line}: not valid JSON: Expecting property name enclosed in double quotes at character 2"


@pytest.fixture
def bad_file(project, sums):
    """The 40 sums with a broken line before each of rows 3 and 20 (lines 4 and 22), and a number for a text in row 30."""
    lines = [json.dumps(row) for row in sums]
    lines[30] = json.dumps({**sums[30], "question": 3})
    lines.insert(20, "{broken")
    lines.insert(3, "{broken")
    (project / "bad.jsonl").write_text("\n".join(lines) + "\n")
    return project / "bad.jsonl"


DROPPED = [
    (3, BROKEN.format(line=4)),
    (21, BROKEN.format(line=22)),
    (32, "bad.jsonl:33: column `question` holds a number here and text in most rows"),
]
SUMMARY = (
    f"3 of 42 rows were dropped, since they cannot be read or used ({DROPPED[0][1]}; {DROPPED[1][1]}; {DROPPED[2][1]})"
)
OUTPUTS = {"train": ["--output-directory", "run"], "predict": ["--output", "out.jsonl"], "evaluate": [], "check": []}


def ledger(path):
    return [(entry["key"], entry["event"], entry["why"]) for entry in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("verb", OUTPUTS)
def test_by_default_bad_rows_are_an_error_with_their_places(brim, project, bad_file, verb):
    before = set(project.iterdir())
    done = brim(verb, "config.yaml", "--dataset", bad_file.name, *OUTPUTS[verb])
    assert done.code == 2
    assert done.err.endswith(
        f"brim: {DROPPED[0][1]}\n  expected: one JSON object a line\n"
        f"{DROPPED[1][1]}\n  expected: one JSON object a line\n"
        "  fix: set preprocessing.on_bad_row: drop to go on without such rows\n"
        "bad.jsonl:33: column `question` changes its type: a number here, text in bad.jsonl:1\n"
        "  expected: one type in all rows of a column\n"
        "  fix: write all of its values in the same type, e.g. all as text; or set preprocessing.on_bad_row: drop to go "
        "on without such rows\n"
    )
    assert set(project.iterdir()) == before


def test_train_goes_on_and_names_them_in_the_ledger(brim, project, bad_file):
    done = brim("train", "config.yaml", DROP, "trainer.epochs=1", "--dataset", bad_file.name, *OUTPUTS["train"])
    assert done.code == 0
    assert SUMMARY in done.err
    assert ledger("run/ledger.parquet") == [(key, "dropped_bad", why) for key, why in DROPPED]
    assert json.loads((project / "run" / "plan.json").read_text())["rows"] == {"train": 27, "validation": 4, "test": 8}


def test_evaluate_goes_on_and_says_so(brim, bad_file):
    done = brim("evaluate", "config.yaml", DROP, "--dataset", bad_file.name, "--split", "full", "--json")
    assert (done.code, SUMMARY in done.err) == (0, True)
    assert json.loads(done.out)["num_rows"] == 39


def test_check_goes_on_and_says_so(brim, bad_file):
    done = brim("check", "config.yaml", DROP, "--dataset", bad_file.name)
    assert done.code == 0
    assert SUMMARY in " ".join(done.out.split())  # wrapped at the terminal's width


def test_predict_goes_on_and_leaves_a_ledger_beside_its_output(brim, project, bad_file, sums):
    done = brim("predict", "config.yaml", DROP, "--dataset", bad_file.name, "--output", "out.jsonl")
    assert (done.code, SUMMARY in done.err) == (0, True)
    assert done.out.endswith("predictions: out.jsonl\ncut or left out: out.jsonl.ledger.parquet\n")
    assert ledger("out.jsonl.ledger.parquet") == [(key, "dropped_bad", why) for key, why in DROPPED]
    rows = pd.read_json(project / "out.jsonl", lines=True)
    assert rows["row"].tolist() == [key for key in range(42) if key not in dict(DROPPED)]
    assert rows["question"].tolist() == [row["question"] for number, row in enumerate(sums) if number != 30]


def test_predict_without_bad_rows_leaves_no_ledger(brim, project):
    done = brim("predict", "config.yaml", DROP, "--dataset", "sums.jsonl", "--output", "out.jsonl")
    assert (done.code, "left out" in done.out) == (0, False)
    assert not (project / "out.jsonl.ledger.parquet").exists()


def test_an_earlier_ledger_is_not_written_over(brim, project, bad_file):
    (project / "out.jsonl.ledger.parquet").write_text("mine")
    done = brim("predict", "config.yaml", DROP, "--dataset", bad_file.name, "--output", "out.jsonl")
    assert done.code == 2
    assert done.err.startswith("brim: out.jsonl.ledger.parquet: the output file exists already; nothing was changed\n")
    assert (project / "out.jsonl.ledger.parquet").read_text() == "mine"
    assert not (project / "out.jsonl").exists()


# Prompts that cannot be continued: the tiny model's context is 128 tokens, and 6 new ones are asked for

PROMPTS = ["add 1 and 2 =", "", "x" * 300, "y" * 122, "z"]


@pytest.fixture
def prompts_file(project):
    rows = pd.DataFrame({"question": PROMPTS, "answer": [" 3"] * 5, "split": [2] * 5})
    rows.to_csv(project / "prompts.csv", index=False)
    return "prompts.csv"


PREDICT = ("predict", "config.yaml", "--dataset", "prompts.csv", "--output", "out.csv")
OVERLONG = "and the context less generation.max_new_tokens is 122 tokens"


def test_prompts_that_cannot_be_continued_are_errors_that_name_the_policies(brim, prompts_file):
    done = brim(*PREDICT)
    assert done.code == 2
    assert done.err.endswith(
        "brim: prompts.csv:3: 1 prompt is empty\n  expected: at least one token to go on from\n"
        "  fix: fill or remove the rows, give the prompt a template, or, for those of a data set, "
        "set preprocessing.on_bad_row: drop to go on without such rows\n"
        "prompts.csv:4 (300 tokens): 1 prompt is too long: too little of the model's context is left for the "
        "answer\n  expected: at most 122 tokens of prompt (context - generation.max_new_tokens)\n"
        "  fix: lower generation.max_new_tokens, shorten or remove the prompts, or, for those of a data set, set "
        "preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted); "
        "`brim predict --on-overlong truncate_left` cuts them and keeps their ends\n"
    )
    assert "1 prompt is too long" in brim(*PREDICT, DROP).err
    assert "1 prompt is empty" in brim(*PREDICT, "preprocessing.on_overlong=drop").err


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_prompts_that_cannot_be_continued_are_left_out_or_cut(brim, project, prompts_file, policy):
    done = brim(*PREDICT, DROP, f"preprocessing.on_overlong={policy}")
    assert done.code == 0
    rows = pd.read_csv(project / "out.csv")
    assert rows["row"].tolist() == ([0, 3, 4] if policy == "drop" else [0, 2, 3, 4])
    assert rows["num_prompt_tokens"].max() == 122
    event = "dropped_overlong" if policy == "drop" else "cut_prompt"
    entries = pq.read_table(project / "out.csv.ledger.parquet").to_pylist()
    assert entries == [
        {"key": 1, "split": "full", "event": "filled_missing", "why": "no value in `question`",
         "tokens_before": None, "tokens_after": None},
        {"key": 1, "split": "full", "event": "dropped_bad", "why": "prompts.csv:3: the prompt is empty",
         "tokens_before": None, "tokens_after": None},
        {"key": 2, "split": "full", "event": event, "why": f"preprocessing.on_overlong is {policy}, {OVERLONG}",
         "tokens_before": 300, "tokens_after": 0 if policy == "drop" else 122},
    ]  # fmt: skip
    if policy == "truncate":
        (project / "cut.csv").write_text(f'question,answer,split\n"{"x" * 122}", 3,2\n')
        done = brim("predict", "config.yaml", "--dataset", "cut.csv", "--output", "alone.csv")
        assert pd.read_csv(project / "alone.csv")["answer_response"][0] == rows["answer_response"][1]


def test_evaluate_leaves_out_what_it_would_have_to_continue(brim, prompts_file):
    arguments = ("evaluate", "config.yaml", "--dataset", "prompts.csv", "preprocessing.on_overlong=drop", "--json")
    assert json.loads(brim(*arguments).out)["num_rows"] == 4  # the empty prompt has an answer to score
    with_texts = brim(*arguments, "--texts", DROP)
    assert (with_texts.code, json.loads(with_texts.out)["num_rows"]) == (0, 3)
    assert "1 of 5 rows were dropped, since they cannot be read or used (prompts.csv:3: the prompt is empty)" in (
        with_texts.err
    )
    assert brim(*arguments, "--texts").code == 2


@pytest.mark.parametrize(("policy", "num_rows"), [("drop", 4), ("truncate", 5)])
def test_train_drops_or_cuts_rows_beyond_the_context(brim, project, prompts_file, policy, num_rows):
    train = ("train", "config.yaml", "--dataset", "prompts.csv", "--output-directory", "run", "trainer.epochs=1")
    settings = (
        "preprocessing.split={type: random, probabilities: [1.0, 0.0, 0.0]}",
        "preprocessing.drop_unlearnable=true",
    )
    refused = brim(*train, *settings)
    assert refused.code == 2
    assert "fix: set preprocessing.on_overlong: truncate to cut them, or drop to leave them out" in refused.err
    done = brim(*train, *settings, f"preprocessing.on_overlong={policy}")
    assert done.code == 0
    expected = {
        "drop": [(2, "dropped_overlong", 302, 0)],
        "truncate": [(2, "cut_joined", 302, 128), (2, "dropped_unlearnable", 128, 0)],
    }
    entries = pq.read_table(project / "run" / "ledger.parquet").to_pylist()
    told = [(e["key"], e["event"], e["tokens_before"], e["tokens_after"]) for e in entries]
    assert told == [(1, "filled_missing", None, None), *expected[policy]]


def test_evaluate_takes_the_rows_that_train_took(brim, project):
    """One row of 200 is longer than the context; of a second one, the prompt leaves the answer too little room."""
    rows = pd.DataFrame(
        {"question": [f"add 1 and {n} =" for n in range(200)], "answer": [" 3"] * 200, "split": [0] * 200}
    )
    rows.loc[4, "question"], rows.loc[7, "question"] = "x" * 300, "y" * 124
    rows.to_csv(project / "few.csv", index=False)
    steps = ("trainer.epochs=1", "trainer.effective_batch_size=100", "--output-directory", "run")
    assert brim("train", "config.yaml", "--dataset", "few.csv", *steps).code == 0
    told = "1 of 200 rows were dropped, since the model's context is too short for them"
    done = brim("evaluate", "run", "--split", "train", "--json")
    assert (done.code, json.loads(done.out)["num_rows"], told in done.err) == (0, 199, True)
    texts = brim("evaluate", "run", "--split", "train", "--texts", "--json")
    assert (texts.code, json.loads(texts.out)["num_rows"]) == (0, 198)
    assert "2 of 200 rows were dropped, since the model's context is too short for them" in texts.err
    refused = brim("predict", "run", "--split", "train", "--output", "out.csv")
    assert refused.code == 2
    assert "2 prompts are too long" in refused.err
