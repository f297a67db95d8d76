"""From data and a configuration to prompts, to token rows, and to what `brim check` tells, with all that happened."""

import datetime
import decimal
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.data.conftest import ALL_TRAIN, BOS, EOS, ids, jsonl, texts_of
from tests.messages import refused, says

from brim.data import check_data, prepare, prompter, prompts_of, texts_as_source
from brim.data.check import Lengths
from brim.data.read import cell_texts, read
from brim.errors import DataError
from brim.notes import kind_of, short_of, topic_of


def test_cells_as_text():
    for cells, kind, texts in [
        ([3, -4, None], pa.int64(), ["3", "-4", "?"]),
        ([0.5, 3.0, float("nan"), 1e20], pa.float64(), ["0.5", "3.0", "?", "1e+20"]),
        ([0.1, None, 3.0], pa.float32(), ["0.1", "?", "3.0"]),
        ([True, False], pa.bool_(), ["True", "False"]),
        (["x", "", None], pa.large_string(), ["x", "", "?"]),
        ([datetime.date(2024, 1, 31)], pa.date32(), ["2024-01-31"]),
        ([decimal.Decimal("1.10")], pa.decimal128(5, 2), ["1.10"]),
        ([None], pa.null(), ["?"]),
    ]:
        assert cell_texts(pa.chunked_array([pa.array(cells, kind)]), fill="?") == texts


def test_a_prompt_is_the_column_or_the_filled_template(make_config):
    template = "{q} at {price:.2f} ({price}), {n:03d}: {{x}} {__sample__}"
    for columns, changes, prompt in [
        ({"q": "one {a}", "a": "x"}, {}, "one {a}"),
        ({"prompt": "one", "completion": "x"}, {"input__name": "prompt", "output__name": "completion"}, "one"),
        ({"Frage": "one", "Antwort": "x"}, {"input__column": "Frage", "output__column": "Antwort"}, "one"),
        ({"q": "tea", "price": "1.5", "n": 7, "a": "x"}, {"prompt__template": template}, "tea at 1.50 (1.5), 007: {x} tea"),
        ({"word": "hi", "a": "x"}, {"input__name": "prompt", "prompt__template": "say {word}"}, "say hi"),
        ({"q": "{a} {q.x} }{", "a": "x"}, {"prompt__template": "<{q}>"}, "<{a} {q.x} }{>"),
    ]:  # fmt: skip
        assert texts_of(make_config(**changes), read([columns])) == [(prompt, "x")]


NO_COLUMNS = "the given columns: no column "
UNUSABLE = [  # changes, columns, and the words of each problem
    ({"output__name": "completion"}, {"q": ["x"], "messages": ["y"]}, [
        f"{NO_COLUMNS}`completion` … set chat: {{}} to learn from the conversations in `messages`"]),
    ({"output__name": "Category"}, {"q": ["x"], "Customer": ["y"], "categories_of": ["z"]}, [
        f"{NO_COLUMNS}`Category` … name a column of the data"]),
    ({}, {"q": [["x"]], "a": [{"text": "y"}]}, [
        "the given columns: column `q` holds lists, which are not text … write what the model should read as a text column",
        "the given columns: column `a` holds objects, which are not text"]),
    ({}, {"q": [b"x"], "a": ["y"]}, ["the given columns: column `q` holds bytes, which are not text"]),
]  # fmt: skip


def test_columns_that_cannot_be_used_are_told(make_config):
    for changes, columns, words in UNUSABLE:
        with refused(*words, by=DataError):
            texts_of(make_config(**changes), read(columns))


def test_features_over_conversations_are_answered_with_chat(make_config, tmp_path):
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    (tmp_path / "rows.jsonl").write_text(jsonl({"id": 1, "messages": messages[0]}))
    to_learn = "set chat: {} to learn from the conversations in `messages`, without input_features and output_features"
    of_another_name = "set chat: {messages: conversations} to learn from the conversations in"
    conversations = [None, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]]
    for asked, data, fix in [
        ("messages", {"messages": messages}, to_learn),
        ("q", tmp_path / "rows.jsonl", to_learn),
        ("q", {"conversations": conversations}, of_another_name),
        ("q", {"question": ["x"], "spans": [[{"start": 1}]]}, "name a column of the data, or add this one"),
    ]:
        with pytest.raises(DataError) as caught:
            texts_of(make_config(input__name=asked), read(data))
        assert all(problem.fix.startswith(fix) for problem in caught.value.problems)


def test_a_sample_is_written_as_json_without_its_quotes_as_in_ludwig(make_config):
    texts = ["plain", 'say "hi"', "two\nlines", "größe", "back\\slash", "3.5", "it's {x}"]
    asked = prompter(make_config(prompt__template="<{__sample__}>"), read({"q": texts}), with_answers=False)
    (made,) = asked.texts(np.arange(len(texts)))
    assert made.prompts == [f"<{json.dumps(text, indent=2).strip(chr(34))}>" for text in texts]
    assert made.prompts[:4] == ["<plain>", '<say \\"hi\\>', "<two\\nlines>", "<gr\\u00f6\\u00dfe>"]
    (note,) = asked.notes()
    assert (kind_of(note), topic_of(note)) == ("warning", "rows")
    assert says(note, "{__sample__} writes line breaks … as in Ludwig, … 4 rows; in a template, {q} is the plain text")
    asked = prompter(make_config(prompt__task="T"), read({"q": ["1"]}), with_answers=False)
    (made,) = asked.texts(np.arange(1))
    assert made.prompts == ["SAMPLE INPUT: 1\n\nUSER: Complete the following task: T\n\nASSISTANT:\n"]
    assert asked.notes() == []


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


def test_set_lengths_cut_and_the_ledger_tells(prepared):
    limits = {"input__preprocessing__max_sequence_length": 5, "output__preprocessing__max_sequence_length": 4}
    limits |= {"preprocessing__global_max_sequence_length": 9, "context_length": 100}
    made = prepared({"q": ["abc", "abcdef"], "a": ["xyz", "xyzuvw"]}, **limits)
    assert [len(row.input_ids) for row in made.splits["train"]] == [8, 9]
    assert made.splits["train"][1].num_supervised == 4
    cuts = [("cut_prompt", 7, 5), ("cut_answer", 6, 4), ("cut_joined", 10, 9)]
    assert entries(made) == [(1, "train", *cut) for cut in cuts]
    whys = [f"{part}put_features[0].preprocessing.max_sequence_length is {n}" for part, n in (("in", 5), ("out", 4))]
    assert [entry.why for entry in made.ledger] == [*whys, "preprocessing.global_max_sequence_length is 9"]
    assert says(made.ledger.summary()[0], f"1 of 2 rows had their prompt cut: … from 7 to 5 tokens ({whys[0]})")

    made = prepared({"q": ["ab"], "a": ["x" * 20]}, preprocessing__global_max_sequence_length=50, context_length=8)
    why = "preprocessing.global_max_sequence_length is 50, the model's context 8"
    assert [(entry.tokens_after, entry.why) for entry in made.ledger] == [(8, why)]
    assert f"{why}: rows are cut at 8 tokens" in made.notes


def test_rows_keep_their_order_and_a_sample_is_drawn_before_splitting(prepared, make_config, encoder):
    columns = {"q": [f"{number}" for number in range(3000)], "a": ["x"] * 3000}
    made = prepare(read(columns), make_config(), encoder, context_length=None)
    assert [len(rows) for rows in made.splits.values()] == [2100, 300, 600]
    for rows in made.splits.values():
        assert (np.diff(rows.keys) > 0).all()
    assert sorted(np.concatenate([rows.keys for rows in made.splits.values()]).tolist()) == list(range(3000))
    (alone,) = prepare(read(columns), make_config(), encoder, context_length=None, only="test").splits.values()
    assert alone.keys.tolist() == made.splits["test"].keys.tolist()
    columns = {"q": list("abcdefghij"), "a": ["x"] * 10}
    assert prepared(columns, preprocessing__sample_size=4).splits["train"].keys.tolist() == [0, 2, 3, 6]
    assert prepared(columns, preprocessing__sample_ratio=0.4).splits["train"].keys.tolist() == [0, 2, 3, 6]


def test_fixed_hash_and_stratified_splits(prepared):
    columns = {"q": list("abcdefghij"), "a": ["x"] * 10, "part": ["train"] * 6 + ["val"] * 2 + ["test"] * 2}
    columns["split"] = [0, 1, 2, 0, 0, 0, 0, 0, 0, 0]

    def keys(**split):
        made = prepared(columns, preprocessing__split=split).splits
        return [made[name].keys.tolist() for name in ("validation", "test")]

    assert keys(type="fixed") == [[1], [2]]
    assert keys(type="fixed", column="part") == [[6, 7], [8, 9]]
    assert keys(type="hash", column="q") == [[3], [8]]
    validation, test = keys(type="stratify", column="part", probabilities=[0.5, 0.0, 0.5])
    assert (validation, len(test)) == ([], 5)
    assert sorted(key // 2 for key in test if key > 5) == [3, 4]

    def noted(columns, **changes):
        return [note for note in prepared(columns, **changes).notes if "not used" in note]

    (note,) = noted({"q": ["x"], "a": ["y"], "split": [0]})
    assert says(note, "the data has a column `split`, which is not used, … is random; … set preprocessing.split: fixed")
    assert noted({"q": ["x"], "split": ["y"]}, output__name="split") == []
    assert noted({"q": ["x"], "a": ["y"], "split": ["z"]}, prompt__template="{q} {split}") == []


def test_missing_cells_are_filled_or_dropped_by_default_and_as_asked(prepared):
    def missing(made):
        return [(e.key, e.event.removesuffix("_missing"), e.why.removeprefix("no value in ")) for e in made.ledger]

    made = prepared({"q": ["a", None, "c", ""], "a": ["x", "y", None, "z"]})
    assert made.splits["train"].keys.tolist() == [0, 1, 3]
    assert missing(made) == [(1, "filled", "`q`"), (2, "dropped", "`a`")]
    assert says(made.ledger.summary()[0], "1 of 4 rows had missing cells, which were filled (no value in `q`)")
    assert says(made.ledger.summary()[1], "1 of 4 rows were dropped: … missing (no value in `a`)")

    frame = pd.DataFrame({"q": ["a", None, "c", None], "a": [1.0, 2.0, float("nan"), None]})
    fill = {"missing_value_strategy": "fill_with_const", "fill_value": "ZZ"}
    made = prepared(frame, input__preprocessing=fill, output__preprocessing={"missing_value_strategy": "drop_row"})
    rows = made.splits["train"]
    assert (rows.keys.tolist(), rows.num_prompt_tokens.tolist()) == ([0, 1], [2, 3])
    assert missing(made) == [(1, "filled", "`q`"), (2, "dropped", "`a`"), (3, "dropped", "`q`, `a`")]


def test_an_empty_prompt_is_text_to_learn_from_scratch_and_an_empty_answer_is_named(prepared):
    (row,) = prepared({"q": [""], "a": ["xyz"]}).splits["train"]
    assert row.num_supervised == 4
    notes = prepared({"q": ["hi", "you"], "a": ["A", " "]}).notes
    assert any(says(note, "the answer of 1 row is empty, so that the model learns to end at once") for note in notes)
    assert not any("is empty" in note for note in prepared({"q": ["hi"], "a": ["A"]}).notes)


def test_special_tokens_in_the_data_are_noted_but_not_those_of_the_template(prepared):
    columns = {"q": ["one", "two</s>", "three"], "a": ["x", "y", "<pad>"]}
    words = "the text of 2 rows spells out special tokens (such as </s>) … the given columns, row 1, the given columns, row 2"
    (told,) = [note for note in prepared(columns, prompt__template="[</s>] {q}").notes if says(note, words)]
    assert (kind_of(told), topic_of(told)) == ("warning", "rows")
    assert short_of(told) == told.partition(",")[0]
    assert len(prepared({"q": ["x"], "a": ["y"]}, prompt__template="</s> {q}").notes) == 2
    doubled = prepared({"q": ["one"], "a": ["x"]}, prompt__template="<s>{q}").notes[-1]
    assert says(doubled, "the prompt of 1 row begins with the beginning-of-sequence token twice")
    assert kind_of(doubled) == "warning"


def test_prompts_to_continue_need_no_answer_and_no_split(encoder, make_config):
    config = make_config(generation__max_new_tokens=5, input__preprocessing__max_sequence_length=4)
    made = prompts_of(read({"q": ["ab", "abcdef"]}), config, encoder)
    assert (made.rows.keys.tolist(), made.rows.lengths.tolist()) == ([0, 1], [3, 4])
    assert made.rows.num_supervised.tolist() == [0, 0]
    assert entries(made) == [(1, "full", "cut_prompt", 7, 4)]
    config = make_config(generation__max_new_tokens=5, preprocessing__split={"type": "fixed"})
    made = prompts_of(read({"q": list("abcd"), "split": [2, 0, 2, 1]}), config, encoder, only="test")
    assert (made.rows.keys.tolist(), made.notes) == ([0, 2], ())
    rows = texts_as_source(["ab", ""], encoder)
    assert [row.input_ids.tolist() for row in rows] == [[BOS, *ids("ab")], [BOS]]
    assert rows.num_supervised.tolist() == [0, 0]
    (row,) = texts_as_source(["ab"], encoder, are_chats=True)
    assert (row.input_ids.tolist(), row.num_prompt_tokens) == (ids("ab"), 2)


FIXED = {"preprocessing__split": {"type": "fixed"}}
MISSING = {f"{side}__preprocessing__missing_value_strategy": "error" for side in ("input", "output")}
COLUMNS = "the given columns"
BAD = [  # columns, changes, and the words of each problem
    ({"q": ["x" * n for n in (3, 30, 20, 40, 25, 22, 21)], "a": ["y"] * 7}, {"context_length": 12}, [
        f"{COLUMNS}, row 3 (43 tokens), {COLUMNS}, row 1 (33 tokens), … row 6 (24 tokens) and 1 more: 6 of 7 rows are "
        "longer than the model's context … at most 12 tokens … on_overlong: truncate … or drop"]),
    ({"q": ["abcdefgh", "a"], "a": ["x", "y"]}, {"preprocessing__global_max_sequence_length": 6}, [
        f"{COLUMNS}, row 0: 1 of 2 rows have nothing to learn from … drop_unlearnable: true"]),
    ({"q": ["a"], "a": ["x"]}, {"prompt__template": "0123456789{q}", "preprocessing__global_max_sequence_length": 10}, [
        "prompt.template: … alone takes 11 tokens, and preprocessing.global_max_sequence_length is 10 … shorten the template"]),
    ({"q": ["a"], "a": ["x"]}, {"prompt__task": "x" * 40, "preprocessing__global_max_sequence_length": 100}, [
        "prompt.task: … shorten the task"]),
    ({"q": ["a", None, "b"], "a": [float("nan"), 1.0, None]}, MISSING, [
        f"{COLUMNS}, row 1: column `q` is empty in 1 row … input_features[0].preprocessing.missing_value_strategy to drop_row",
        f"{COLUMNS}, row 0, {COLUMNS}, row 2: column `a` is empty in 2 rows … output_features[0].preprocessing"]),
    ({"q": ["a"], "a": ["x"], "Split": [0]}, FIXED, [
        f"{COLUMNS}: no column `split`, which preprocessing.split.column names … did you mean `Split`?"]),
]  # fmt: skip


def test_data_that_cannot_be_learned_from_is_told(prepared):
    for columns, changes, words in BAD:
        with refused(*words, by=DataError):
            prepared(columns, **changes)
    nothing_to_train = {"q": list("ab"), "a": list("xy"), "split": [1, 2]}
    made = prepared(nothing_to_train, **FIXED, trainer__type="none", adapter=None)
    assert [len(rows) for rows in made.splits.values()] == [0, 1, 1]


def test_the_report_counts_rows_and_tokens_and_shows_what_is_learned(encoder, make_config):
    source = read({"q": ["x" * n for n in range(1, 11)], "a": [f"answer {n}" for n in range(10)]})
    config = make_config(preprocessing__global_max_sequence_length=16, output__preprocessing__max_sequence_length=7)
    report = check_data(config, source, encoder, context_length=64)
    assert [(part.name, part.num_rows) for part in report.splits] == [("train", 7), ("validation", 1), ("test", 2)]
    prompts = [1 + n for n in range(1, 11)]
    totals = [min(n + 8, 16) for n in prompts]
    assert sum(part.num_tokens for part in report.splits) == sum(totals)
    assert sum(part.num_supervised_tokens for part in report.splits) == sum(totals) - sum(prompts)
    answers, rows = report.events
    assert says(answers, "10 of 10 rows had their answer cut: the longest from 8 to 7 tokens")
    assert says(rows, "3 of 10 rows were cut as a whole … the longest from 19 to 16 tokens")
    train, validation, _ = check_data(make_config(**ALL_TRAIN), source, encoder, context_length=None).splits
    assert train.prompt == Lengths(median=7, p95=11, p99=11, max=11)
    assert train.total == Lengths(median=16, p95=20, p99=20, max=20)
    assert (validation.num_rows, validation.total) == (0, None)
    assert type(train.total.median) is int
    two_to_train = {"preprocessing__split__probabilities": [0.2, 0.0, 0.8], "prompt__template": "Q: {q}\nA:"}
    samples = check_data(make_config(**two_to_train), source, encoder, context_length=None, show=3).samples
    for sample in samples:
        assert sample.where == f"the given columns, row {sample.key}"
        texts = [(f"<s>Q: {'x' * (sample.key + 1)}\nA:", False), (f"answer {sample.key}</s>", True)]
        assert [(segment.text, segment.supervised) for segment in sample.segments] == texts
    first, second, _ = (sample.key for sample in samples)
    assert first < second, "of the train split"
