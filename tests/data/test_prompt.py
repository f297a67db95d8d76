"""Cells as text, and templates over them."""

import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pytest

from brim.data import prompter
from brim.data.read import BATCH_ROWS, cell_texts, read
from brim.errors import DataError, Problem
from brim.notes import kind_of, topic_of


def prompts_of(config, source, keys=None):
    asked = prompter(config, source, with_answers=True)
    keys = np.arange(source.table.num_rows) if keys is None else np.asarray(keys)
    batches = list(asked.texts(keys))
    assert [key for batch in batches for key in batch.keys.tolist()] == keys.tolist()
    return [text for batch in batches for text in batch.prompts], [text for batch in batches for text in batch.answers]


@pytest.mark.parametrize(
    ("cells", "kind", "texts"),
    [
        ([3, -4, None], pa.int64(), ["3", "-4", "?"]),
        ([0.5, 3.0, float("nan"), 1e20], pa.float64(), ["0.5", "3.0", "?", "1e+20"]),
        ([0.1, None, 3.0], pa.float32(), ["0.1", "?", "3.0"]),
        ([True, False], pa.bool_(), ["True", "False"]),
        (["x", "", None], pa.large_string(), ["x", "", "?"]),
        ([datetime.date(2024, 1, 31)], pa.date32(), ["2024-01-31"]),
        ([decimal.Decimal("1.10")], pa.decimal128(5, 2), ["1.10"]),
        ([None], pa.null(), ["?"]),
    ],
)
def test_cells_as_text(cells, kind, texts):
    assert cell_texts(pa.chunked_array([pa.array(cells, kind)]), fill="?") == texts


def test_without_a_template_the_prompt_is_the_column(make_config):
    source = read({"q": ["one {a}", "two"], "a": ["x", "y"]})
    assert prompts_of(make_config(), source) == (["one {a}", "two"], ["x", "y"])


def test_prompt_and_completion_are_columns_like_others(make_config):
    config = make_config(input__name="prompt", output__name="completion")
    source = read({"prompt": ["one"], "completion": ["x"]})
    assert prompts_of(config, source) == (["one"], ["x"])


def test_a_feature_may_name_its_column(make_config):
    config = make_config(input__column="Frage", output__column="Antwort")
    assert prompts_of(config, read({"Frage": ["one"], "Antwort": ["x"]})) == (["one"], ["x"])


def test_a_template_takes_columns_numbers_and_literal_braces(make_config):
    config = make_config(prompt__template="{q} at {price:.2f} ({price}), {n:03d}: {{x}} {__sample__}")
    source = read({"q": ["tea"], "price": ["1.5"], "n": [7], "a": ["x"]})
    assert prompts_of(config, source)[0] == ["tea at 1.50 (1.5), 007: {x} tea"]


def test_the_input_feature_may_be_absent_with_a_template(make_config):
    config = make_config(input__name="prompt", prompt__template="say {word}")
    assert prompts_of(config, read({"word": ["hi"], "a": ["x"]}))[0] == ["say hi"]


def test_braces_in_cells_are_left_alone(make_config):
    config = make_config(prompt__template="<{q}>")
    assert prompts_of(config, read({"q": ["{a} {q.x} }{"], "a": ["x"]}))[0] == ["<{a} {q.x} }{>"]


def test_chosen_rows_keep_their_keys_across_batches(make_config):
    num_rows = 2 * BATCH_ROWS + 10
    source = read({"q": [f"q{number}" for number in range(num_rows)], "a": ["x"] * num_rows})
    keys = [0, 5, BATCH_ROWS - 1, BATCH_ROWS, num_rows - 1]
    assert prompts_of(make_config(), source, keys)[0] == [f"q{key}" for key in keys]


@pytest.mark.parametrize(
    ("changes", "columns", "message"),
    [
        (
            {"prompt__template": "{Q} {n}"},
            {"q": ["x"], "m": [1], "answer": ["y"]},
            "the given columns: no column `Q`, which prompt.template names\n"
            "  expected: one of the columns that are there: `q`, `m`, `answer`\n  fix: did you mean `q`?\n"
            "the given columns: no column `n`, which prompt.template names\n"
            "  expected: one of the columns that are there: `q`, `m`, `answer`\n"
            "  fix: name a column of the data, or add this one\n"
            "the given columns: no column `a`, which output_features[0] names\n"
            "  expected: one of the columns that are there: `q`, `m`, `answer`\n"
            "  fix: name a column of the data, or add this one",
        ),
        (
            {"output__name": "completion"},
            {"q": ["x"], "messages": ["y"]},
            "the given columns: no column `completion`, which output_features[0] names\n"
            "  expected: one of the columns that are there: `q`, `messages`\n"
            "  fix: set chat: {} to learn from the conversations in `messages`, without input_features and "
            "output_features",
        ),
        (
            {"output__name": "Category"},
            {"q": ["x"], "Customer": ["y"], "categories_of": ["z"]},
            "the given columns: no column `Category`, which output_features[0] names\n"
            "  expected: one of the columns that are there: `q`, `Customer`, `categories_of`\n"
            "  fix: name a column of the data, or add this one",
        ),
        (
            {"output__name": "anser"},
            {"q": ["x"], "answer": ["y"]},
            "the given columns: no column `anser`, which output_features[0] names\n"
            "  expected: one of the columns that are there: `q`, `answer`\n  fix: did you mean `answer`?",
        ),
        (
            {},
            {"q": [["x"]], "a": [{"text": "y"}]},
            "the given columns: column `q` holds lists, which are no text\n"
            "  expected: text, numbers, true or false, or dates\n"
            "  fix: write what the model should read as a text column\n"
            "the given columns: column `a` holds objects, which are no text\n"
            "  expected: text, numbers, true or false, or dates\n"
            "  fix: write what the model should read as a text column",
        ),
        (
            {},
            {"q": [b"x"], "a": ["y"]},
            "the given columns: column `q` holds bytes, which are no text\n"
            "  expected: text, numbers, true or false, or dates\n"
            "  fix: write what the model should read as a text column",
        ),
    ],
)
def test_columns_that_cannot_be_used_are_told(make_config, changes, columns, message):
    with pytest.raises(DataError) as caught:
        prompts_of(make_config(**changes), read(columns))
    assert str(caught.value) == message


def test_a_row_that_does_not_fit_the_template_is_left_out_and_told(make_config):
    source = read({"n": ["1", "x", "3"], "a": ["y", "z", "w"]})
    asked = prompter(make_config(prompt__template="{n:.2f}"), source, with_answers=True)
    (texts,) = asked.texts(np.arange(3))
    assert (texts.keys.tolist(), texts.prompts, texts.answers) == ([0, 2], ["1.00", "3.00"], ["y", "w"])
    assert asked.faults.problems == {
        1: Problem(
            what="column n holds 'x', which the format {n:.2f} of prompt.template does not fit", expected="a number"
        )
    }


def test_a_sample_is_written_as_json_without_its_quotes_as_in_ludwig(make_config):
    texts = ["plain", 'say "hi"', "two\nlines", "größe", "back\\slash", "3.5", "it's {x}"]
    asked = prompter(make_config(prompt__template="<{__sample__}>"), read({"q": texts}), with_answers=False)
    (made,) = asked.texts(np.arange(len(texts)))
    assert made.prompts == [f"<{json.dumps(text, indent=2).strip(chr(34))}>" for text in texts]
    assert made.prompts[:4] == ["<plain>", '<say \\"hi\\>', "<two\\nlines>", "<gr\\u00f6\\u00dfe>"]
    assert [(kind_of(note), topic_of(note)) for note in asked.notes()] == [("warning", "rows")]
    assert asked.notes() == [
        "{__sample__} writes line breaks, quotes, backslashes and letters beyond ASCII as JSON does, as in Ludwig, which "
        "changes the input of 4 rows; in a template, {q} is the plain text"
    ]


def test_plain_samples_are_nothing_to_tell(make_config):
    asked = prompter(make_config(prompt__task="T"), read({"q": ["x", "1"]}), with_answers=False)
    (made,) = asked.texts(np.arange(2))
    assert made.prompts[1] == "SAMPLE INPUT: 1\n\nUSER: Complete the following task: T\n\nASSISTANT:\n"
    assert asked.notes() == []


TURNS = {
    "messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2,
    "conversations": [None, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]],
}


@pytest.mark.parametrize("kind", ["columns", "jsonl"])
@pytest.mark.parametrize(("column", "section"), [("messages", "{}"), ("conversations", "{messages: conversations}")])
@pytest.mark.parametrize("features", [("messages", "answer"), ("conversations", "answer"), ("question", "reply")])
def test_features_over_conversations_are_answered_with_chat(make_config, tmp_path, kind, column, section, features):
    data = {"id": [1, 2], column: TURNS[column]}
    if kind == "jsonl":
        rows = [{"id": number, column: turns} for number, turns in zip(data["id"], TURNS[column], strict=True)]
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(input__name=features[0], output__name=features[1])
    with pytest.raises(DataError) as caught:
        prompts_of(config, read(data))
    fix = (
        f"set chat: {section} to learn from the conversations in `{column}`, without input_features and output_features"
    )
    assert {problem.fix for problem in caught.value.problems} == {fix}


def test_a_list_that_is_no_conversation_is_not_answered_with_chat(make_config):
    with pytest.raises(DataError) as caught:
        prompts_of(make_config(), read({"question": ["x"], "tags": [["y"]], "spans": [[{"start": 1}]]}))
    assert all(problem.fix == "name a column of the data, or add this one" for problem in caught.value.problems)
