"""What is wrong with a configuration, its base model and its data is told in one round."""

import json

import pytest

BAD = '{"question": "a", "answer": "b", "split": 0}\n{broken\n' + '{"question": "a", "answer": "b", "split": 0}\n' * 4


@pytest.fixture
def wrong(project):
    """A misspelt key, a template with a column that is not there, another answer's name, and a broken line."""
    text = (project / "config.yaml").read_text().replace("name: answer", "name: reply").replace("epochs: 2", "epoch: 2")
    (project / "config.yaml").write_text(text + "prompt: {template: '{question} {hint}'}\n")
    (project / "bad.jsonl").write_text(BAD)
    return project


ALL = [
    "config.yaml:17: unknown key trainer.epoch",
    "bad.jsonl: no column `hint`, which prompt.template names",
    "bad.jsonl: no column `reply`, which output_features[0] names",
    "bad.jsonl:2: not valid JSON: ",
]


def told(done):
    return [line for line in done.err.removeprefix("brim: ").splitlines() if not line.startswith("  ")]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("check", "config.yaml", "--dataset", "bad.jsonl"), None),
        (("check", "config.yaml", "dataset=bad.jsonl"), None),
        (("train", "config.yaml", "--dataset", "bad.jsonl"), None),
        (("plan", "config.yaml", "--dataset", "bad.jsonl"), None),
        (("evaluate", "config.yaml", "--dataset", "bad.jsonl"), None),
        (("predict", "config.yaml", "--dataset", "bad.jsonl", "--output", "out.csv"), 2),
        (("embed", "config.yaml", "--dataset", "bad.jsonl", "--output", "out.parquet"), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_configuration_the_columns_and_the_rows(brim, wrong, command, missing):
    done = brim(*command)
    assert done.code == 2
    lines = told(done)
    expected = [text for number, text in enumerate(ALL) if number != missing]
    assert len(lines) == len(expected)
    assert all(line.startswith(text) for line, text in zip(lines, expected, strict=True))


def test_as_json_too(brim, wrong):
    done = brim("check", "config.yaml", "--dataset", "bad.jsonl", "--json")
    assert (done.code, done.err) == (2, "")
    error = json.loads(done.out)["error"]
    assert [problem["where"] for problem in error["problems"]] == [
        "config.yaml:17",
        "bad.jsonl",
        "bad.jsonl",
        "bad.jsonl:2",
    ]


def test_a_right_configuration_with_wrong_columns_cells_and_rows(brim, project):
    (project / "bad.jsonl").write_text(BAD + '{"question": null, "answer": "b"}\n')
    done = brim(
        "check",
        "config.yaml",
        "--dataset",
        "bad.jsonl",
        "preprocessing.split.column=part",
        "output_features.0.name=reply",
        "input_features.0.preprocessing={missing_value_strategy: error}",
    )
    assert told(done) == [
        "bad.jsonl: no column `reply`, which output_features[0] names",
        "bad.jsonl: no column `part`, which preprocessing.split.column names",
        done.err.splitlines()[6],
        "bad.jsonl:7: column `question` is empty in 1 row",
    ]
    assert done.err.splitlines()[6].startswith("bad.jsonl:2: not valid JSON: ")


def test_a_base_model_that_is_not_there_hides_nothing(brim, project):
    (project / "bad.jsonl").write_text(BAD)
    done = brim("check", "config.yaml", "--dataset", "bad.jsonl", "base_model=nowhere", "output_features.0.name=reply")
    assert [line.split(": ")[0] for line in told(done)] == ["base_model", "bad.jsonl", "bad.jsonl:2"]


@pytest.mark.parametrize(
    "override",
    [
        "template={question}",
        "output_features=3",
        "input_features.0.nam=x",
        "chat=3",
        "messages_column=x",
    ],
)
def test_what_a_wrong_key_may_change_is_not_told_as_the_datas_fault(brim, project, override):
    (project / "config.yaml").write_text(f"base_model: {project / 'base'}\ntrainer: finetune\n")
    (project / "rows.csv").write_text("question,answer\na,b\n")
    done = brim("check", "config.yaml", "--dataset", "rows.csv", override)
    assert done.code == 2
    assert all(line.startswith("override ") for line in told(done))


def test_a_misspelt_template_still_says_its_columns(brim, wrong):
    text = (wrong / "config.yaml").read_text().replace("{template:", "{templat:").replace("epoch:", "epochs:")
    (wrong / "config.yaml").write_text(text)
    done = brim("check", "config.yaml", "--dataset", "bad.jsonl")
    assert told(done)[1:] == ["bad.jsonl: no column `reply`, which output_features[0] names", done.err.splitlines()[5]]


def test_a_configuration_without_a_fault_of_its_own_reads_no_data_twice(brim, project, monkeypatch):
    import brim.cli.options as opening

    monkeypatch.setattr(opening, "problems_with_data", lambda *args, **kwargs: pytest.fail("read"))
    assert brim("check", "config.yaml", "--dataset", "sums.jsonl").code == 0
