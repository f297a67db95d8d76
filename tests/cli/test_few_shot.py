"""Tasks and examples from the training split, through the verbs."""

import ast
import json
import re

import pandas as pd
import pytest

RANDOM = "prompt.retrieval={type: random, k: 2}"


@pytest.fixture
def few_shot(project):
    """The configuration without training; sums.jsonl is its data, new.jsonl asks for two rows more."""
    text = (project / "config.yaml").read_text()
    text = text[: text.index("trainer:")].replace("adapter: lora\n", "dataset: sums.jsonl\n")
    (project / "config.yaml").write_text(f'{text}prompt:\n  template: "{{__context__}} {{question}}"\n')
    new = [{"question": "add 9 and 9 ="}, {"question": "add 1 and 1 ="}]
    (project / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))
    return project


def test_check_shows_rows_with_their_examples(brim, few_shot, sums):
    done = brim("check", "config.yaml", RANDOM, "--show", "1")
    assert (done.code, done.err) == (0, "")
    (context,) = re.findall(r"^\[.*\](?= add 0 and 0 =« 0<\|end\|>»$)", done.out, re.MULTILINE)
    labelled = {row["question"]: row["answer"] for row in sums if row["split"] == 0}
    examples = ast.literal_eval(context)
    assert len(examples) == 2
    assert all(labelled[example["question"]] == example["answer"] for example in examples)


def test_check_loads_no_model_of_sentences(brim, few_shot):
    done = brim("check", "config.yaml", "prompt.retrieval={type: semantic, k: 2, model_name: /no/model}")
    assert (done.code, done.err) == (0, "")
    assert "prompt.retrieval is semantic, and its model is not loaded for a check" in done.out


def test_a_task_alone_is_asked_in_the_built_in_words(brim, few_shot):
    done = brim("check", "config.yaml", "prompt={task: Add.}", "--show", "1")
    assert "SAMPLE INPUT: add 0 and 0 =\n\nUSER: Complete the following task: Add.\n\nASSISTANT:\n« 0" in done.out


def test_predictions_are_the_same_for_a_file_of_its_own_and_among_others(brim, few_shot):
    assert brim("predict", "config.yaml", RANDOM, "--output", "all.jsonl").code == 0
    assert brim("predict", "config.yaml", RANDOM, "--split", "test", "--output", "test.jsonl").code == 0
    both = [pd.read_json(few_shot / name, lines=True) for name in ("all.jsonl", "test.jsonl")]
    assert len(both[1]) == 8
    in_both = both[0][both[0]["row"].isin(both[1]["row"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(in_both, both[1])
    assert both[0]["num_prompt_tokens"].min() > 70  # with two examples


def test_new_rows_get_examples_of_the_configurations_data(brim, few_shot):
    done = brim("predict", "config.yaml", RANDOM, "--dataset", "new.jsonl", "--output", "new.parquet")
    assert done.code == 0
    assert "1 row has its very input in the training split of sums.jsonl" in done.err
    frame = pd.read_parquet(few_shot / "new.parquet")
    assert frame["question"].tolist() == ["add 9 and 9 =", "add 1 and 1 ="]
    assert (frame["num_prompt_tokens"] > 70).all()


def test_new_rows_without_any_labelled_data_are_refused(brim, few_shot):
    command = ("predict", "config.yaml", RANDOM, "dataset=null", "--dataset", "new.jsonl", "--output", "new.parquet")
    done = brim(*command)
    assert (done.code, done.out) == (2, "")
    assert "prompt.retrieval takes examples from the training split, and it is not said of which data" in done.err
    assert not (few_shot / "new.parquet").exists()


def test_a_run_with_examples_is_trained_evaluated_and_asked_anew(brim, project):
    prompt = 'prompt={template: "{__context__} {question}", retrieval: {type: random, k: 1}}'
    train = brim(
        "train", "config.yaml", prompt, "trainer.train_steps=1", "--dataset", "sums.jsonl", "--output-directory", "run"
    )
    assert train.code == 0
    (project / "new.jsonl").write_text('{"question": "add 9 and 9 ="}\n')
    done = brim("predict", "run", "--dataset", "new.jsonl", "--output", "new.jsonl.parquet")
    assert done.code == 0
    assert pd.read_parquet(project / "new.jsonl.parquet")["num_prompt_tokens"].item() > 40
    evaluated = brim("evaluate", "run", "--split", "test", "--json")
    assert evaluated.code == 0
    assert json.loads(evaluated.out)["num_rows"] == 8


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (4, "prompts are too long: too little of the model's context is left for the answer"),
        (40, "the training split has 28 different inputs, and prompt.retrieval.k asks for 40 examples"),
    ],
)
def test_too_many_examples_are_told(brim, few_shot, k, message):
    done = brim("predict", "config.yaml", f"prompt.retrieval={{type: random, k: {k}}}", "--output", "out.jsonl")
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not (few_shot / "out.jsonl").exists()
