"""The examples in each row's prompt: from where, whose, and never the row's own."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.data.letter_encoder import LetterEncoder
from tests.properties import examples

from brim.data import check_data, prepare, prompter, prompts_of, retrieval
from brim.data.read import read
from brim.data.retrieval import without_embeddings
from brim.errors import ConfigError, DataError, Problem

ROWS = {
    "q": ["aab", "abb", "xyz", "aaa", "xxy", "aab"],
    "a": ["1", "2", "3", "4", "5", "6"],
    "split": [0, 0, 0, 0, 1, 2],
}
CONTEXT = {"prompt__template": "{__context__}>{q}", "preprocessing__split": "fixed"}
RANDOM = {**CONTEXT, "prompt__retrieval": {"type": "random", "k": 2}}
SEMANTIC = {**CONTEXT, "prompt__retrieval": {"type": "semantic", "k": 2, "model_name": "letters"}}


@pytest.fixture
def letters(monkeypatch):
    """An encoder in the place of the one that a name stands for."""
    encoder = LetterEncoder()
    monkeypatch.setattr(retrieval, "load_sentence_encoder", {"letters": encoder}.__getitem__)
    return encoder


def asked(config, columns, keys=None, split=None):
    made = prompter(config, read(columns), with_answers=False, split=split)
    keys = np.arange(len(columns["q"])) if keys is None else np.array(keys)
    prompts = [prompt for batch in made.texts(keys) for prompt in batch.prompts]
    return made, [prompt.rpartition(">") for prompt in prompts]


def examples_of(prompts):
    """The examples' inputs in each prompt, by the input of the prompt's own row."""
    return [(own, [example["q"] for example in eval(context)]) for context, _, own in prompts]  # noqa: S307


def test_the_nearest_training_rows_come_first_and_a_rows_own_input_never(make_config, letters):
    made, prompts = asked(make_config(**SEMANTIC), ROWS)
    assert examples_of(prompts) == [
        ("aab", ["aaa", "abb"]),
        ("abb", ["aab", "aaa"]),
        ("xyz", ["aab", "abb"]),
        ("aaa", ["aab", "abb"]),
        ("xxy", ["xyz", "aab"]),
        ("aab", ["aaa", "abb"]),
    ]
    assert prompts[0][0] == "[{'q': 'aaa', 'a': '4'}, {'q': 'abb', 'a': '2'}]"
    assert letters.asked == ["aab", "abb", "xyz", "aaa", "xxy"]  # inputs alone, and each once
    assert made.notes() == []


@examples(50)
@given(
    st.lists(st.text("ab{}'\" ", max_size=3), min_size=3, max_size=20),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.randoms(),
)
def test_a_query_is_never_among_its_examples_which_are_different_and_its_own(make_config, questions, k, seed, random):
    columns = {"q": questions, "a": ["x"] * len(questions), "split": [0] * len(questions)}
    changes = {**RANDOM, "prompt__retrieval": {"type": "random", "k": k}, "random_seed": seed}
    if len(set(questions)) <= k:
        return
    _, prompts = asked(make_config(**changes), columns)
    found = examples_of(prompts)
    assert [own for own, _ in found] == questions
    assert all(own not in examples and len(set(examples)) == k for own, examples in found)
    some = sorted(random.sample(range(len(questions)), 2))
    assert examples_of(asked(make_config(**changes), columns, some)[1]) == [found[row] for row in some]


def test_another_seed_draws_other_examples(make_config):
    columns = {"q": [f"q{n}" for n in range(40)], "a": ["x"] * 40, "split": [0] * 40}
    first, second = (asked(make_config(**RANDOM, random_seed=seed), columns)[1] for seed in (1, 2))
    assert first != second


def test_texts_of_examples_are_not_substituted_again(make_config):
    columns = {"q": ["{q}", "{__task__}{{", "{__context__}"], "a": ["{a.__class__}"] * 3, "split": [0] * 3}
    template = {**RANDOM, "prompt__template": "{__task__}{__context__}>{q}", "prompt__task": "{q}"}
    _, prompts = asked(make_config(**template), columns)
    assert [own for _, _, own in prompts] == columns["q"]
    for context, _, own in prompts:
        assert context.startswith("{q}[")
        assert sorted(example["q"] for example in eval(context[3:])) == sorted({*columns["q"]} - {own})  # noqa: S307


def test_too_few_other_inputs_are_a_fault_of_the_row(make_config):
    columns = {"q": ["one", "two", "three"], "a": ["x"] * 3, "split": [0, 0, 1]}
    made, prompts = asked(make_config(**RANDOM), columns)
    assert [own for _, _, own in prompts] == ["three"]
    problem = Problem(
        what="only 1 training rows have another input, and prompt.retrieval.k asks for 2 examples",
        fix="lower prompt.retrieval.k",
    )
    assert made.faults.problems == {0: problem, 1: problem}


@pytest.fixture
def files(tmp_path):
    """Labelled data and new data, as files."""
    train, new = tmp_path / "train.jsonl", tmp_path / "new.jsonl"
    rows = [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new.write_text("".join(json.dumps({"q": text}) + "\n" for text in ("aab", "xyy")))
    return str(train), str(new)


def test_new_data_gets_examples_of_the_configurations_own(make_config, letters, files):
    train, new = files
    config = make_config(**SEMANTIC, dataset=train)
    made = prompter(config, read(new), with_answers=False, split="full")
    (texts,) = made.texts(np.arange(2))
    assert texts.prompts[0].startswith("[{'q': 'aaa', 'a': '4'}, {'q': 'abb', 'a': '2'}]")
    assert texts.own_prompts == [">aab", ">xyy"]
    assert made.notes() == [
        f"1 row has its very input in the training split of {read(train).name}, where it is no example for it"
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_new_data_without_any_labelled_data_is_an_error(make_config, files, trains):
    config = make_config(**RANDOM, trainer={"type": "finetune" if trains else "none"})
    with pytest.raises(ConfigError) as caught:
        prompter(config, read(files[1]), with_answers=False, split="full")
    assert str(caught.value) == (
        "dataset: prompt.retrieval takes examples from the training split, and it is not said of which data\n"
        "  expected: the key `dataset`: the labelled data whose training split holds the examples; beside it, the rows "
        "to run over may come from another file\n"
        "  fix: add `dataset: train.jsonl` to the configuration, or dataset=train.jsonl to the command; or name a split "
        "of this file with --split"
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_of_the_given_data_gets_examples_of_its_training_split(make_config, files, split):
    made = prompter(make_config(**RANDOM), read(files[0]), with_answers=False, split=split)
    assert made.contexts is not None
    assert len(made.contexts.pool) == 4


def test_what_is_trained_on_is_where_examples_are_from(make_config, files, tmp_path):
    elsewhere = tmp_path / "gone.jsonl"
    made = prompter(make_config(**RANDOM, dataset=str(elsewhere)), read(files[0]), with_answers=True)
    assert made.contexts is not None
    assert made.contexts.elsewhere is None


def test_rows_are_prepared_with_examples_for_training_and_prediction_alike(make_config, encoder, files):
    train, _ = files
    config = make_config(**RANDOM, dataset=train)
    prepared = prepare(read(train), config, encoder, context_length=None)
    whole = prompts_of(read(train), config, encoder).rows
    assert [len(rows) for rows in prepared.splits.values()] == [4, 1, 1]
    for rows in prepared.splits.values():
        for row, prompt in zip(rows, rows.prompts(), strict=True):
            assert whole[row.key].input_ids.tolist() == prompt.input_ids.tolist()
    assert encoder.decode(whole[2].input_ids.tolist(), skip_special_tokens=True).startswith("[{'q': ")


def test_a_limit_that_the_task_alone_exceeds_is_an_error(make_config, encoder):
    config = make_config(prompt__task="x" * 40, preprocessing__global_max_sequence_length=100)
    with pytest.raises(DataError) as caught:
        prepare(read({"q": ["a"] * 10, "a": ["b"] * 10}), config, encoder, context_length=None)
    assert str(caught.value) == (
        "prompt.task: the prompt template alone takes 105 tokens, and "
        "preprocessing.global_max_sequence_length is 100\n"
        "  expected: a length that leaves room for the row's values\n  fix: raise the length or shorten the task"
    )


def test_a_check_loads_no_model_and_says_so(make_config, encoder, monkeypatch):
    monkeypatch.setattr(retrieval, "is_installed", lambda: False)
    report = check_data(make_config(**SEMANTIC), read(ROWS), encoder, context_length=None, show=1)
    assert report.notes[0] == (
        "prompt.retrieval is semantic, and its model is not loaded for a check: the examples here, and the lengths with "
        "them, are of rows drawn by chance; to train or predict so, sentence-transformers must be there: "
        "pip install 'brim[retrieval]'"
    )
    assert report.samples[0].segments[0].text.startswith("<s>[{'q': ")
    drawn = make_config(**RANDOM)
    assert without_embeddings(drawn) == (drawn, [])


def test_examples_are_no_advice_on_answers_in_prompts(advice_on):
    answer = "an answer that has the length of a sentence"
    questions = [f"question {n}\n" for n in range(20)]
    changes = {"prompt__template": "{__context__}\n{q}", "prompt__retrieval": {"type": "random", "k": 3}}
    found = advice_on(questions, [f"{answer} {n % 2}" for n in range(20)], **changes)
    assert "answer_in_prompt" not in found
    repeated = advice_on([*questions, questions[0]], [f"{answer} {n % 2}" for n in range(21)], **changes)
    assert repeated["duplicates"].rows.tolist() == [20]
