"""From data and a configuration to token rows, with everything that happened on the way."""

import numpy as np
import pandas as pd
import pytest

from brim.data import prepare, prompts_of, texts_as_source
from brim.data.read import read
from brim.errors import DataError
from brim.notes import kind_of, short_of, topic_of

BOS, EOS = 0, 1
EVERY_ROW_TRAINS = {"preprocessing__split__type": "random", "preprocessing__split__probabilities": [1.0, 0.0, 0.0]}


def ids(text):
    return [ord(character) - 30 for character in text]


@pytest.fixture
def prepared(encoder, make_config):
    def run(columns, *, context_length=None, only=None, **changes):
        config = make_config(**{**EVERY_ROW_TRAINS, **changes})
        return prepare(read(columns), config, encoder, context_length=context_length, only=only)

    return run


def entries(made):
    return [(e.key, e.split, e.event, e.tokens_before, e.tokens_after) for e in made.ledger]


def test_loss_is_on_the_answer_and_its_end(prepared):
    made = prepared({"q": ["hi", "you"], "a": ["A", "BC"]})
    first, second = made.splits["train"]
    assert first.input_ids.tolist() == [BOS, *ids("hiA"), EOS]
    assert first.supervised.tolist() == [False, False, False, True, True]
    assert second.num_supervised == 3
    assert made.splits["train"].keys.tolist() == [0, 1]
    assert (len(made.splits["validation"]), len(made.splits["test"])) == (0, 0)
    assert made.notes == ("the validation split has no rows", "the test split has no rows")
    assert entries(made) == []


def test_set_lengths_cut_and_the_ledger_tells(prepared):
    made = prepared(
        {"q": ["abc", "abcdef"], "a": ["xyz", "xyzuvw"]},
        input__preprocessing__max_sequence_length=5,
        output__preprocessing__max_sequence_length=4,
        preprocessing__global_max_sequence_length=9,
        context_length=100,
    )
    assert [len(row.input_ids) for row in made.splits["train"]] == [8, 9]
    assert made.splits["train"][1].num_supervised == 4
    assert entries(made) == [
        (1, "train", "cut_prompt", 7, 5),
        (1, "train", "cut_answer", 6, 4),
        (1, "train", "cut_joined", 10, 9),
    ]
    assert [entry.why for entry in made.ledger] == [
        "input_features[0].preprocessing.max_sequence_length is 5",
        "output_features[0].preprocessing.max_sequence_length is 4",
        "preprocessing.global_max_sequence_length is 9",
    ]
    assert made.ledger.summary()[0] == (
        "1 of 2 rows had their prompt cut: the longest from 7 to 5 tokens "
        "(input_features[0].preprocessing.max_sequence_length is 5)"
    )


def test_a_global_length_beyond_the_context_counts_as_the_context(prepared):
    made = prepared(
        {"q": ["ab", "a"], "a": ["x" * 20, "y"]}, preprocessing__global_max_sequence_length=50, context_length=8
    )
    assert made.splits["train"].lengths.tolist() == [8, 4]
    why = "preprocessing.global_max_sequence_length is 50, the model's context 8"
    assert [entry.why for entry in made.ledger] == [why]
    assert f"{why}: rows are cut at 8 tokens" in made.notes


def test_the_order_of_rows_is_that_of_the_source(prepared, make_config, encoder):
    columns = {"q": [f"{number}" for number in range(3000)], "a": ["x"] * 3000}
    made = prepare(read(columns), make_config(), encoder, context_length=None)
    sizes = {name: len(rows) for name, rows in made.splits.items()}
    assert sizes == {"train": 2100, "validation": 300, "test": 600}
    for rows in made.splits.values():
        assert (np.diff(rows.keys) > 0).all()
    assert sorted(np.concatenate([rows.keys for rows in made.splits.values()]).tolist()) == list(range(3000))
    alone = prepare(read(columns), make_config(), encoder, context_length=None, only="test").splits
    assert list(alone) == ["test"]
    assert alone["test"].keys.tolist() == made.splits["test"].keys.tolist()
    assert prepared(columns, only="full").splits["full"].keys.tolist() == list(range(3000))


def test_a_sample_is_drawn_before_splitting(prepared):
    columns = {"q": list("abcdefghij"), "a": ["x"] * 10}
    assert prepared(columns, preprocessing__sample_size=4).splits["train"].keys.tolist() == [0, 2, 3, 6]
    assert prepared(columns, preprocessing__sample_ratio=0.4).splits["train"].keys.tolist() == [0, 2, 3, 6]


def test_fixed_hash_and_stratified_splits(prepared):
    columns = {"q": list("abcdefghij"), "a": ["x"] * 10, "part": ["train"] * 6 + ["val"] * 2 + ["test"] * 2}
    columns["split"] = [0, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    split = {"type": "fixed"}
    assert {n: len(r) for n, r in prepared(columns, preprocessing__split=split).splits.items()} == {
        "train": 8,
        "validation": 1,
        "test": 1,
    }
    made = prepared(columns, preprocessing__split={"type": "fixed", "column": "part"})
    assert made.splits["validation"].keys.tolist() == [6, 7]
    made = prepared(columns, preprocessing__split={"type": "hash", "column": "q"})
    assert [made.splits[name].keys.tolist() for name in ("validation", "test")] == [[3], [8]]
    made = prepared(
        columns, preprocessing__split={"type": "stratify", "column": "part", "probabilities": [0.5, 0.0, 0.5]}
    )
    assert sorted(key // 2 for key in made.splits["test"].keys.tolist() if key > 5) == [3, 4]
    assert len(made.splits["test"]) == 5


def test_a_column_split_that_is_not_used_is_noted(prepared):
    note = (
        "the data has a column `split`, which is not used, since preprocessing.split.type is random; "
        "to use it, set preprocessing.split: fixed"
    )
    assert note in prepared({"q": ["x"], "a": ["y"], "split": [0]}).notes
    answers = prepared({"q": ["x"], "split": ["y"]}, output__name="split")
    assert not any("not used" in each for each in answers.notes)
    template = prepared({"q": ["x"], "a": ["y"], "split": ["z"]}, prompt__template="{q} {split}")
    assert not any("not used" in each for each in template.notes)


def test_a_missing_input_is_an_empty_text_and_a_missing_answer_leaves_its_row_out(prepared):
    made = prepared({"q": ["a", None, "c", ""], "a": ["x", "y", None, "z"]})
    assert made.splits["train"].keys.tolist() == [0, 1, 3]
    assert [(e.key, e.event, e.why) for e in made.ledger] == [
        (1, "filled_missing", "no value in `q`"),
        (2, "dropped_missing", "no value in `a`"),
    ]
    assert made.ledger.summary() == [
        "1 of 4 rows had missing cells, which were filled (no value in `q`)",
        "1 of 4 rows were dropped: a cell that the prompt or the answer needs is missing (no value in `a`)",
    ]


def test_missing_cells_are_dropped_or_filled_as_asked(prepared):
    frame = pd.DataFrame({"q": ["a", None, "c", None], "a": [1.0, 2.0, float("nan"), None]})
    made = prepared(
        frame,
        input__preprocessing={"missing_value_strategy": "fill_with_const", "fill_value": "ZZ"},
        output__preprocessing={"missing_value_strategy": "drop_row"},
    )
    rows = made.splits["train"]
    assert rows.keys.tolist() == [0, 1]
    assert rows.num_prompt_tokens.tolist() == [2, 3]
    assert [(e.key, e.event, e.why) for e in made.ledger] == [
        (1, "filled_missing", "no value in `q`"),
        (2, "dropped_missing", "no value in `a`"),
        (3, "dropped_missing", "no value in `q`, `a`"),
    ]


def test_rows_with_nothing_to_learn_are_dropped_as_asked(prepared):
    made = prepared(
        {"q": ["abcdefgh", "a"], "a": ["x", "y"]},
        preprocessing__global_max_sequence_length=6,
        preprocessing__drop_unlearnable=True,
    )
    assert made.splits["train"].keys.tolist() == [1]
    assert entries(made) == [(0, "train", "cut_joined", 11, 6), (0, "train", "dropped_unlearnable", 6, 0)]


def test_an_empty_prompt_is_text_to_learn_from_scratch(prepared):
    (row,) = prepared({"q": [""], "a": ["xyz"]}).splits["train"]
    assert row.num_supervised == 4


def test_special_tokens_in_the_data_are_noted_but_not_those_of_the_template(prepared):
    columns = {"q": ["one", "two</s>", "three"], "a": ["x", "y", "<pad>"]}
    note = (
        "the text of 2 rows spells out special tokens (such as </s>), which the model reads as those tokens: "
        "the given columns, row 1, the given columns, row 2"
    )
    (told,) = [each for each in prepared(columns, prompt__template="[</s>] {q}").notes if each == note]
    assert (kind_of(told), topic_of(told)) == ("warning", "rows")
    assert short_of(told) == note.partition(",")[0]
    assert len(prepared({"q": ["x"], "a": ["y"]}, prompt__template="</s> {q}").notes) == 2


def test_a_doubled_beginning_is_noted(prepared):
    made = prepared({"q": ["one"], "a": ["x"]}, prompt__template="<s>{q}")
    assert made.notes[-1] == (
        "the prompt of 1 row begins with the beginning-of-sequence token twice: the text has it and the tokenizer adds it"
    )
    assert kind_of(made.notes[-1]) == "warning"


def test_prompts_to_continue_need_no_answer_and_no_split(encoder, make_config):
    config = make_config(generation__max_new_tokens=5, input__preprocessing__max_sequence_length=4)
    made = prompts_of(read({"q": ["ab", "abcdef"]}), config, encoder)
    assert made.rows.keys.tolist() == [0, 1]
    assert made.rows.lengths.tolist() == [3, 4]
    assert made.rows.num_supervised.tolist() == [0, 0]
    assert entries(made) == [(1, "full", "cut_prompt", 7, 4)]


def test_prompts_of_a_split(encoder, make_config):
    config = make_config(generation__max_new_tokens=5, preprocessing__split={"type": "fixed"})
    made = prompts_of(read({"q": list("abcd"), "split": [2, 0, 2, 1]}), config, encoder, only="test")
    assert made.rows.keys.tolist() == [0, 2]
    assert made.notes == ()


def test_finished_texts_are_rows_to_continue(encoder):
    rows = texts_as_source(["ab", ""], encoder)
    assert [row.input_ids.tolist() for row in rows] == [[BOS, *ids("ab")], [BOS]]
    assert rows.num_supervised.tolist() == [0, 0]
    assert len(texts_as_source([], encoder)) == 0


def test_nothing_is_added_to_prompts_that_a_chat_template_has_written(encoder):
    (row,) = texts_as_source(["ab"], encoder, are_chats=True)
    assert row.input_ids.tolist() == texts_as_source(["ab"], encoder)[0].input_ids.tolist()[1:]
    assert row.num_prompt_tokens == 2


BAD = {
    "over the context": (
        {"q": ["x" * n for n in (3, 30, 20, 40, 25, 22, 21)], "a": ["y"] * 7},
        {"context_length": 12},
        "the given columns, row 3 (43 tokens), the given columns, row 1 (33 tokens), the given columns, row 4 (28 tokens), "
        "the given columns, row 5 (25 tokens), the given columns, row 6 (24 tokens) and 1 more: "
        "6 of 7 rows are longer than the model's context\n"
        "  expected: at most 12 tokens of prompt, answer and end of sequence\n"
        "  fix: set preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted); "
        "or set max_sequence_length of a feature to cut prompts or answers alone",
    ),
    "nothing to learn": (
        {"q": ["abcdefgh", "a"], "a": ["x", "y"]},
        {"preprocessing__global_max_sequence_length": 6},
        "the given columns, row 0: 1 of 2 rows have nothing to learn from: no token of the answer is left\n"
        "  expected: at least one token of the answer after all cuts\n"
        "  fix: raise the lengths, shorten the prompts, or set preprocessing.drop_unlearnable: true",
    ),
    "template too long": (
        {"q": ["a"], "a": ["x"]},
        {"prompt__template": "0123456789{q}", "preprocessing__global_max_sequence_length": 10},
        "prompt.template: the prompt template alone takes 11 tokens, and preprocessing.global_max_sequence_length is 10\n"
        "  expected: a length that leaves room for the row's values\n  fix: raise the length or shorten the template",
    ),
    "missing cells": (
        {"q": ["a", None, "b"], "a": [float("nan"), 1.0, None]},
        {f"{side}__preprocessing__missing_value_strategy": "error" for side in ("input", "output")},
        "the given columns, row 1: column `q` is empty in 1 row\n  expected: a value in every row\n"
        "  fix: fill the cells, or set input_features[0].preprocessing.missing_value_strategy to drop_row or "
        "fill_with_const\n"
        "the given columns, row 0, the given columns, row 2: column `a` is empty in 2 rows\n"
        "  expected: a value in every row\n"
        "  fix: fill the cells, or set output_features[0].preprocessing.missing_value_strategy to drop_row or "
        "fill_with_const",
    ),
    "no such split column": (
        {"q": ["a"], "a": ["x"], "Split": [0]},
        {"preprocessing__split": {"type": "fixed"}},
        "the given columns: no column `split`, which preprocessing.split.column names\n"
        "  expected: one of the columns that are there: `q`, `a`, `Split`\n  fix: did you mean `Split`?",
    ),
    "unknown splits": (
        {"q": list("abcd"), "a": list("wxyz"), "split": ["train", "tset", "3", "tset"]},
        {"preprocessing__split": {"type": "fixed"}},
        "the given columns, row 1, the given columns, row 3: column `split` holds 'tset' in 2 rows, which is no split\n"
        "  expected: 0, 1, 2 or train, validation, test\n"
        "  fix: correct the cells, or name another column in preprocessing.split.column\n"
        "the given columns, row 2: column `split` holds '3' in 1 row, which is no split\n"
        "  expected: 0, 1, 2 or train, validation, test\n"
        "  fix: correct the cells, or name another column in preprocessing.split.column",
    ),
    "a split spelt in two ways": (
        {"q": list("abc"), "a": list("xyz"), "split": ["train", "0", "test"]},
        {"preprocessing__split": {"type": "fixed"}},
        "the given columns: column `split` writes the train split in 2 ways: '0', 'train'\n"
        "  expected: one way of writing each split\n  fix: write it the same in all rows",
    ),
    "empty split cells": (
        {"q": list("abc"), "a": list("xyz"), "split": [0, None, 1]},
        {"preprocessing__split": {"type": "hash", "column": "split"}},
        "the given columns, row 1: column `split`, by which the data is split, is empty in 1 row\n"
        "  expected: a value in every row\n  fix: fill the cells, or split by another column or at random",
    ),
    "nothing to train on": (
        {"q": list("ab"), "a": list("xy"), "split": [1, 2]},
        {"preprocessing__split": {"type": "fixed"}},
        "the given columns: no rows are left to train on\n  expected: at least one row in the train split\n"
        "  fix: look at preprocessing.split and at what was dropped",
    ),
}


@pytest.mark.parametrize(("columns", "changes", "message"), BAD.values(), ids=BAD)
def test_data_that_cannot_be_learned_from_is_told(prepared, columns, changes, message):
    with pytest.raises(DataError) as caught:
        prepared(columns, **changes)
    assert str(caught.value) == message


def test_nothing_to_train_on_is_fine_where_nothing_is_trained(prepared):
    columns = {"q": list("ab"), "a": list("xy"), "split": [1, 2]}
    made = prepared(columns, preprocessing__split={"type": "fixed"}, trainer__type="none", adapter=None)
    assert [len(rows) for rows in made.splits.values()] == [0, 1, 1]


def test_an_empty_answer_is_named(prepared):
    made = prepared({"q": ["hi", "you"], "a": ["A", " "]})
    assert any(
        note.startswith("the answer of 1 row is empty, so that the model learns to end at once") for note in made.notes
    )
    assert not any("is empty" in note for note in prepared({"q": ["hi"], "a": ["A"]}).notes)
