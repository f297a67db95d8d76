"""Predictions, labels, activations and comparisons of models: each beside its row, and in files that say the same."""

from __future__ import annotations

import datetime
import json
import math
import re
import shutil
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, strategies as st
from tests.conftest import make_llama
from tests.gallery import SIZES, usual

import brim
from brim.data.read import read
from brim.errors import ConfigError, DataError, InputError, OutputError, WriteError
from brim.infer.metrics import Measure, intervals
from brim.notes import kind_of
from brim.workflows.prediction import embedding as activations, write_predictions
from brim.workflows.prediction.prompts import row_keys

pytestmark = pytest.mark.run
FULL = Mock(side_effect=OSError(28, "No space left on device"))
ADDED = ["answer_response", "finish_reason", "num_prompt_tokens", "num_response_tokens"]


@pytest.fixture(scope="module")
def table():
    """Prompts of very different lengths, with key columns of every kind."""
    prompts = ["add 1 and 2 =", "x" * 90, "a", "größer? 数", "add 3 and 4 =", 'two\nlines, "quoted"']
    return pa.table(
        {
            "id": pa.array([5, 3, None, 2**60 + 1, 0, -1], pa.int64()),
            "weight": pa.array([0.1234567890123456, 1e-300, None, 3.0, -0.0, 1e22], pa.float64()),
            "question": prompts,
            "on": pa.array([datetime.date(2024, 1, 31)] * 5 + [None]),
            "sure": pa.array([True, None, False, True, True, False]),
            "tags": pa.array([["a", "b"], [], None, ["c"], ["d"], ["e"]]),
        }
    )


@pytest.fixture
def dropping(zero_shot):
    feature = {"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}
    return {**zero_shot, "input_features": [feature]}


def test_a_response_stands_beside_its_row_whatever_the_batch(model, table):
    done = []
    result = model.predict(table, on_batch=done.append)
    frame = result.predictions
    assert list(frame) == ["row", *table.column_names, *ADDED]
    assert frame["row"].tolist() == list(range(6))
    assert frame["question"].tolist() == table["question"].to_pylist()
    assert frame["answer_response"].tolist() == [model.generate(prompt) for prompt in table["question"].to_pylist()]
    assert result.output is None
    assert result.seconds > 0
    assert done == [4, 2]  # by the configuration's size
    for rows in (1, 6):
        pd.testing.assert_frame_equal(model.predict(table, batch_size=rows).predictions, frame)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_files_hold_what_the_frame_holds_and_the_data_as_it_was(model, table, tmp_path, ending):
    path = tmp_path / "new" / f"predictions.{ending}"
    result = model.predict(table, output=path)
    assert repr(result) == f"PredictResult: 6 rows, {path}"
    assert (result.output, result.left_out.empty, result.num_left_out) == (path, True, {})
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == [f".{path.name}.job", path.name, f"{path.name}.summary.json"]
    back = read(path).table
    assert back.column_names == list(result.predictions)
    for name in ("row", "question", *ADDED):
        assert back[name].to_pylist() == result.predictions[name].tolist()
    if ending == "parquet":
        assert {name: back[name].to_pylist() for name in table.column_names} == table.to_pydict()
    elif ending == "jsonl":
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        for name in ("id", "weight", "question", "sure", "tags"):
            assert [row[name] for row in rows] == table[name].to_pylist()
        assert [row["on"] for row in rows] == ["2024-01-31"] * 5 + [None]
        assert "größer? 数" in text
    else:
        cells = pd.read_csv(path, dtype=str, keep_default_na=False)
        assert cells["id"].tolist() == ["5", "3", "", str(2**60 + 1), "0", "-1"]
        assert cells["weight"].tolist() == ["0.1234567890123456", "1e-300", "", "3.0", "-0.0", "1e+22"]
        assert cells["on"].tolist() == ["2024-01-31"] * 5 + [""]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_any_text_survives_each_format(tmp_path_factory, ending, texts):
    path = tmp_path_factory.mktemp("texts") / f"p.{ending}"
    write_predictions(pd.DataFrame({"row": range(len(texts)), "text": [f"<{text}>" for text in texts]}), path)
    table = read(path).table
    assert table["text"].to_pylist() == [f"<{text}>" for text in texts]


def test_jsonl_is_json_even_where_a_figure_is_none_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    frame = pd.DataFrame({"a": [1.5, math.nan], "b": [pd.Timestamp("2024-01-31 12:00"), pd.NaT]})
    write_predictions(frame, tmp_path / "p.jsonl")
    lines = (tmp_path / "p.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first, second) == ({"a": 1.5, "b": "2024-01-31 12:00:00"}, {"a": None, "b": None})
    monkeypatch.setattr(pd.DataFrame, "to_csv", FULL)
    with pytest.raises(WriteError, match="the output cannot be written: No space left on device"):
        write_predictions(pd.DataFrame({"a": [1]}), tmp_path / "p.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_rows_that_are_dropped_are_left_out_and_the_others_keep_their_numbers(dropping, tmp_path):
    model = brim.Model(dropping)
    rows = pd.DataFrame({"id": ["a", "b", "c", "d"], "question": ["x", None, "y", None]})
    result = model.predict(rows)
    assert result.predictions["row"].tolist() == [0, 2]
    assert result.predictions["id"].tolist() == ["a", "c"]
    assert result.left_out["row"].tolist() == [1, 3]
    assert all(result.left_out["why"].str.contains("question"))
    assert (len(result), result.num_left_out) == (2, {"dropped_missing": 2})
    assert result.predictions.attrs["left_out"] == {"dropped_missing": [1, 3]}
    first, second = repr(result).splitlines()
    assert first == "PredictResult: 2 of 4 rows, in memory"
    assert second.startswith("  2 were dropped: a cell that the prompt or the answer needs is missing (row 1, 3; see")
    none = pa.table({"question": pa.array([None, None], pa.string())})
    assert len(model.predict(none, output=tmp_path / "p.parquet").predictions) == 0
    assert pq.read_table(tmp_path / "p.parquet").column_names == ["row", "question", *ADDED]


def test_training_and_evaluation_say_which_rows_were_not_used(dropping):
    model = brim.Model(dropping, overrides=["preprocessing.split={type: random, probabilities: [0.5, 0.25, 0.25]}"])
    rows = pd.DataFrame({"question": ["x", None, "y", None] * 5, "answer": ["z"] * 20})
    trained, evaluated = model.train(rows), model.evaluate(rows)
    assert sum(trained.num_rows.values()) == len(evaluated.rows) == 10
    assert trained.num_left_out == evaluated.num_left_out == {"dropped_missing": 10}


def test_a_split_is_predicted_alone_and_settings_of_a_call_are_for_that_call(model, zero_shot, sums_file):
    every = model.predict(sums_file).predictions
    test = model.predict(sums_file, split="test").predictions
    assert test["row"].tolist() == [8, 9, 18, 19, 28, 29, 38, 39]
    pd.testing.assert_frame_equal(test, every[every["split"] == 2].reset_index(drop=True))
    longer = model.predict(sums_file, split="test", generation={"max_new_tokens": 12}).predictions
    assert longer["num_response_tokens"].max() == 12
    pd.testing.assert_frame_equal(model.predict(sums_file, split="test").predictions, test)
    filled = brim.Model({**zero_shot, "prompt": {"template": "add {a} and {b} ="}}).predict({"a": [1, 2], "b": [2, 2]})
    assert filled.predictions["answer_response"].tolist() == model.generate(["add 1 and 2 =", "add 2 and 2 ="])


RECORDS = [
    {
        "question": "a",
        "messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2", "weight": 0}],
        "about": {"n": 1, "tags": ["x", "y"]},
    },
    {"question": "b", "messages": [{"role": "user", "content": "zwölf"}], "about": None},
]


@pytest.mark.parametrize(("form", "ending"), [("frame", "csv"), ("jsonl", "parquet"), ("parquet", "jsonl")])
def test_lists_and_objects_come_out_as_they_went_in(model, tmp_path, form, ending):
    """In csv as JSON; a key that some objects lack is null in them where the format has one type for all."""
    frame, data, path = pd.DataFrame(RECORDS), tmp_path / f"data.{form}", tmp_path / f"out.{ending}"
    if form == "jsonl":
        data.write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    elif form == "parquet":
        frame.to_parquet(data)
    result = model.predict(frame if form == "frame" else data, output=path)
    if ending == "csv":
        cells = dict.fromkeys(("messages", "about"), lambda cell: json.loads(cell or "null"))
        found = pd.read_csv(path, converters=cells).to_dict("records")
    elif ending == "jsonl":
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        found = pq.read_table(path).to_pylist()
    for records in (found, result.predictions.to_dict("records")):
        for record, expected in zip(records, RECORDS, strict=True):
            turns = [{key: value for key, value in turn.items() if value is not None} for turn in record["messages"]]
            assert (turns, record["about"]) == (expected["messages"], expected["about"])


def test_objects_whose_keys_differ_from_row_to_row_stay_json_in_parquet(model, tmp_path):
    rows = [{"question": "a", "about": {f"key{n}": n}} for n in range(80)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    model.predict(tmp_path / "data.jsonl", output=tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")["about"].to_pylist()
    assert list(map(json.loads, found)) == [each["about"] for each in rows]


ROWS = np.array([0, 2, 3], dtype=np.int64)


def test_rows_are_known_by_their_number_or_by_a_value_wherever_it_stands():
    keys = row_keys(read({"a": [1, 2, 3, 4]}), ROWS, column=None)
    assert (keys.dtype, keys.tolist()) == (np.uint64, [0, 2, 3])
    many = [f"id {number}" for number in range(3000)]
    keys, backwards = (row_keys(read({"id": ids}), np.arange(3000), column="id").tolist() for ids in (many, many[::-1]))
    assert keys == backwards[::-1]
    assert len(set(keys)) == 3000
    number, text = (row_keys(read({"id": ids}), np.arange(1), column="id") for ids in ([7], ["7"]))
    assert number == text
    assert len(row_keys(read({"id": ["a", "a", "b", "c"]}), ROWS, column="id")) == 3  # others may share a value


def test_values_that_cannot_tell_rows_apart_are_counted_and_located():
    with pytest.raises(DataError) as refused:
        row_keys(read({"id": ["a", "b", "a", None, "", "b", "b", "c"]}), np.arange(8), column="id")
    missing, shared = refused.value.problems
    assert missing.what == "2 rows have no value in `id`, by which rows are to be identified"
    assert missing.where == "the given columns, row 3, the given columns, row 4"
    assert shared.what.startswith("3 rows have a value in `id` that an earlier row has, too: 'a' stands in the given")
    assert shared.where == "the given columns, row 2, the given columns, row 5, the given columns, row 6"
    with pytest.raises(InputError, match="by which rows cannot be identified"):
        row_keys(read({"id": [["a"], ["b"]]}), np.arange(2), column="id")


HINT = "; with output_features.0.decoder.constrain_to_vocabulary=true the model can write nothing but labels"
QUESTIONS = [f"add {a} and {b} =" for a in range(4) for b in range(3)]
FREE = {
    "constrained": False,
    "match": {"nine": {"type": "regex", "value": "9"}, "two": {"type": "contains", "value": "2"}},
    "generation": {"max_new_tokens": 24, "temperature": 1.0, "top_k": None},
}
LEARNED = {"constrained": False, "trainer": {"type": "finetune"}}
FINAL = "the longest label and its end"


@pytest.fixture
def category(tiny_base):
    """A model that is asked for the size of a sum."""

    def make(*, constrained=True, match=SIZES, length=None, **keys):
        feature = {
            "name": "size",
            "type": "category",
            "preprocessing": {"fallback_label": "none", "max_sequence_length": length},
            "decoder": {"match": match, "constrain_to_vocabulary": constrained},
        }
        config = usual(tiny_base, output_features=[feature], **{"generation": {"do_sample": False}, **keys})
        trainer = keys.get("trainer", {"type": "none"})
        return brim.Model(
            {**config, "adapter": None, "trainer": trainer, "preprocessing": keys.get("preprocessing", {})}
        )

    return make


def test_as_many_tokens_are_planned_as_the_longest_label_has(category):
    for keys, tokens, reasons in (
        ({}, 12, [FINAL]),  # of " very large" each letter is a token
        ({"generation": {"max_new_tokens": 64}}, 12, [f"{FINAL}; 64 are set"]),
        (LEARNED, 12, [FINAL]),
        ({**LEARNED, "generation": {"max_new_tokens": 64}}, 64, []),
        ({**LEARNED, "length": 5}, 5, ["the output feature's max_sequence_length"]),
        # Of a model that was taught nothing, words before the label are room that is needed.
        (
            {"constrained": False},
            64,
            ["half of the model's context; no length is set would leave too little for prompts"],
        ),
    ):
        session = category(**keys)._open()
        assert session.config.generation.max_new_tokens == tokens
        assert [choice.reason for choice in session.choices if choice.key == "generation.max_new_tokens"] == reasons


def test_nothing_but_labels_is_generated_and_none_is_cut(category):
    assert {answer.strip() for answer in category().generate(QUESTIONS)} <= {*SIZES, "none"}
    with pytest.raises(ConfigError) as caught:
        category(generation={"max_new_tokens": 10})._open()
    (problem,) = caught.value.problems
    assert problem.what == "generation.max_new_tokens 10 is too short for the labels"
    assert problem.expected == "at least 11 tokens, those of the longest label"
    with pytest.raises(ConfigError, match="too short for the labels"):
        category().generate(QUESTIONS, max_new_tokens=3)


def test_predictions_have_a_column_of_labels(category, tmp_path):
    said = []
    result = category(**FREE).predict({"question": QUESTIONS}, output=tmp_path / "sizes.jsonl", say=said.append)
    frame = result.predictions
    assert list(frame.columns)[:4] == ["row", "question", "size_response", "size_predictions"]
    expected = ["nine" if "9" in text else "two" if "2" in text else "none" for text in frame["size_response"]]
    assert frame["size_predictions"].tolist() == expected
    assert set(expected) == {"nine", "two", "none"}  # or the test would show little
    num_fallback = expected.count("none")
    assert result.summary["category"] == {
        "labels": dict(Counter(expected).most_common()),
        "num_fallback": num_fallback,
        "num_looked_at_in_part": 0,
    }
    assert f"{num_fallback} of 12 responses name no label and got the fallback label{HINT}" in said


def test_other_rules_need_no_other_responses(category, tmp_path):
    output = tmp_path / "sizes.jsonl"
    settings = {"constrained": False, "generation": {"max_new_tokens": 8}}
    before = category(**settings).predict({"question": QUESTIONS}, output=output)
    match = {"a": {"type": "contains", "value": "a"}, "other": {"type": "regex", "value": "."}}
    after = category(match=match, **settings).predict({"question": QUESTIONS}, output=output, resume=True)
    assert after.seconds == 0
    assert after.predictions["size_response"].tolist() == before.predictions["size_response"].tolist()
    assert after.predictions["size_predictions"].isin(["a", "other"]).all()
    assert json.loads(output.read_text().splitlines()[0])["size_predictions"] in ("a", "other")
    with pytest.raises(OutputError, match="constrain_to_vocabulary"):
        category(generation={"max_new_tokens": 8}, match={"a": match["a"], "b": match["a"] | {"value": "b"}}).predict(
            {"question": QUESTIONS}, output=output, resume=True
        )


def test_evaluation_generates_labels_by_itself(category):
    said, model = [], category(**FREE)
    data = {"question": QUESTIONS, "size": ["nine", " two", "none"] * 4}
    predicted = model.predict({"question": QUESTIONS}).predictions["size_predictions"].tolist()
    result = model.evaluate(data, say=said.append)
    wanted = [label.strip() for label in data["size"]]
    right = [a == b for a, b in zip(predicted, wanted, strict=True)]
    assert result.rows["label"].tolist() == predicted
    assert result.metrics["category_accuracy"] == sum(right) / 12
    assert result.intervals["category_accuracy"].low <= sum(right) / 12 <= result.intervals["category_accuracy"].high
    assert f"{predicted.count('none')} of 12 responses name no label and got the fallback label{HINT}" in said
    assert ("macro_f1" in result.metrics, "bleu" in result.metrics) == (True, False)
    with pytest.raises(DataError, match="the label 'huge', which is unknown"):
        model.evaluate({"question": QUESTIONS, "size": ["nine"] * 11 + ["huge"]})


TEXTS = {
    "question": ["add 3 and 4 =", "x", "add 1 and 2 = 3; the sum of", "add 10 and 12 =", "add 3 and 4 = "],
    "answer": [" 7", " 1", " 4", " 22", " 7"],
    "split": [0, 1, 2, 2, 0],
}


@pytest.fixture(scope="module")
def hidden(tiny_base):
    """The oracle: transformers' tokenizer and hidden states [L + 1, T, D] of each prompt alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32).eval()
    states = []
    for text in TEXTS["question"]:
        with torch.no_grad():
            found = base(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        states.append(torch.stack(found)[:, 0].numpy())
    return states


def test_activations_are_of_prompts_alone_in_the_order_of_the_input(model, hidden):
    found = model.collect_activations(["last", 0], TEXTS, batch_size=2)
    assert found.rows.tolist() == [0, 1, 2, 3, 4]
    assert found.num_tokens.tolist() == [states.shape[1] for states in hidden]
    assert (found.widths, found.output, found.ledger) == ({"last": 32, "0": 32}, None, None)
    for layer, state in (("last", -1), ("0", 1)):
        means = [states[state].mean(axis=0) for states in hidden]
        np.testing.assert_allclose(found.by_layer[layer], means, rtol=1e-5, atol=1e-5)
    by_token = model.collect_activations("last", TEXTS, pooling=None).by_layer["last"]
    assert [vectors.shape for vectors in by_token] == [states[-1].shape for states in hidden]
    for vectors, states in zip(by_token, hidden, strict=True):
        np.testing.assert_allclose(vectors, states[-1], rtol=1e-5, atol=1e-5)
    split = model.collect_activations(-1, TEXTS, split="test", pooling="last", normalize=True)
    assert split.rows.tolist() == [2, 3]
    assert np.linalg.norm(split.by_layer["-1"], axis=1) == pytest.approx([1, 1])
    with pytest.raises(DataError, match="the split 'validation' has no rows"):
        model.collect_activations(-1, {**TEXTS, "split": [0, 0, 2, 2, 0]}, split="validation")


@pytest.mark.parametrize("pooling", ["mean", None])
def test_the_file_of_activations_holds_what_memory_would_hold(model, tmp_path, monkeypatch, pooling):
    monkeypatch.setattr(activations, "_BLOCK_BYTES", 4 * 32 * 3)  # several blocks; a row of more than 3 tokens alone
    held = model.collect_activations(["last", 0], TEXTS, pooling=pooling)
    output = tmp_path / "new" / "vectors.parquet"
    written = model.collect_activations(["last", 0], TEXTS, pooling=pooling, output=output, columns=["one", "two"])
    assert (written.by_layer, written.output, written.ledger) == ({}, output, None)
    table = pq.read_table(output)
    vector = pa.list_(pa.float32(), 32)
    kind = vector if pooling else pa.list_(vector)
    assert table.schema.equals(pa.schema({"row": pa.int64(), "one": kind, "two": kind}))
    assert table["row"].to_pylist() == [0, 1, 2, 3, 4]
    assert pq.ParquetFile(output).num_row_groups > 1 or pooling
    for column, layer in (("one", "last"), ("two", "0")):
        for row, vectors in zip(table[column].to_pylist(), held.by_layer[layer], strict=True):
            np.testing.assert_array_equal(np.array(row, dtype=np.float32), vectors)
    assert [path.name for path in output.parent.iterdir()] == ["vectors.parquet"]
    model.collect_activations(["last", "layers.0.mlp"], TEXTS, output=tmp_path / "named.parquet")
    assert pq.read_schema(tmp_path / "named.parquet").names == ["row", "last", "layers.0.mlp"]


def test_what_is_left_out_or_cut_stands_in_the_ledger(model, tmp_path):
    long = {"question": ["one", "", "x" * 300, "two"], "answer": ["a"] * 4}
    strict = brim.Model(model.config, overrides=["preprocessing.split=random"])
    for rows, message in ((slice(4), "1 of 4 rows are longer than the model's context"), (slice(2), "prompt is empty")):
        with pytest.raises(DataError, match=message):
            strict.collect_activations("last", {name: column[rows] for name, column in long.items()})
    drop = ["preprocessing.split=random", "preprocessing.on_bad_row=drop"]
    for policy, rows, tokens in (("drop", [0, 3], 0), ("truncate", [0, 2, 3], 128)):
        output, said = tmp_path / f"{policy}.parquet", []
        lenient = brim.Model(model.config, overrides=[*drop, f"preprocessing.on_overlong={policy}"])
        found = lenient.collect_activations("last", long, output=output, say=said.append)
        assert found.rows.tolist() == rows
        entries = {each["key"]: each for each in pq.read_table(found.ledger).to_pylist()}
        assert entries.keys() == {1, 2}
        assert entries[2]["tokens_after"] == tokens
        assert any("1 of 4 rows" in line for line in said)


def test_activations_that_cannot_be_written_leave_everything_as_it_was(model, tmp_path, monkeypatch):
    output, some = tmp_path / "vectors.parquet", {**TEXTS, "question": ["", *TEXTS["question"][1:]]}
    lenient = brim.Model(model.config, overrides=["preprocessing.on_bad_row=drop"])
    with monkeypatch.context() as patch:
        patch.setattr(activations, "_write_blocks", FULL)
        with pytest.raises(WriteError, match="the output cannot be written: No space left on device"):
            lenient.collect_activations("last", some, output=output)
    assert list(tmp_path.iterdir()) == []
    for there in (output, tmp_path / "vectors.parquet.ledger.parquet"):
        there.write_text("precious")
        with pytest.raises(OutputError, match="the output file exists already; nothing was changed"):
            model.collect_activations("last", TEXTS, output=output)
        assert there.read_text() == "precious"
        there.unlink()


@pytest.fixture
def trained(gallery):
    """The folder of a run with an adapter."""
    return gallery("lora").run


def test_a_run_is_compared_with_its_base_on_the_same_rows(trained, sums_file):
    said = []
    result = brim.Model.load(trained).evaluate(sums_file, with_texts=True, against="base", say=said.append)
    base = brim.Model.load(trained, overrides=["adapter=null"]).evaluate(sums_file, with_texts=True)
    found = result.comparison
    assert found.num_rows == 40
    # Evaluations of their own may take other batches: losses agree to 1e-5, so that exp of a loss does to 1e-4.
    assert found.other_metrics == pytest.approx({name: base.metrics[name] for name in found.other_metrics}, rel=1e-4)
    assert set(found.differences) == set(result.intervals) == set(found.difference_intervals)
    for name, difference in found.differences.items():
        near = 2e-4 * abs(base.metrics[name]) + 1e-9
        assert difference == pytest.approx(result.metrics[name] - base.metrics[name], abs=near)
        interval = found.difference_intervals[name]
        assert interval.low - 1e-9 <= difference <= interval.high + 1e-9
    assert found.differences["loss"] != 0
    assert found.notes == ()
    batches = [line for line in said if re.search(r"batch: \d+ batch", line)]
    assert [line.startswith("batch: ") for line in batches] == [True, False], "the second model's notes name it"
    assert [kind_of(line) for line in batches] == ["plan", "detail"]
    differences = result.rows["loss"] - base.rows["loss"]
    measure = Measure.ratio(differences.to_numpy(), result.rows["num_supervised"].to_numpy())
    expected = intervals({"loss": measure}, len(differences))["loss"]
    interval = found.difference_intervals["loss"]
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_a_model_that_was_trained_just_now_stays_trained(config, sums_file, tmp_path):
    model = brim.Model(config)
    model.train(sums_file, output_directory=tmp_path / "run")
    before = model.evaluate(sums_file).metrics["loss"]
    compared = model.evaluate(sums_file, against="base")
    assert compared.comparison.differences["loss"] != 0
    for metrics in (compared.metrics, model.evaluate(sums_file).metrics):
        assert metrics["loss"] == pytest.approx(before, rel=1e-5)


@pytest.fixture
def another(tiny_base, tmp_path, zero_shot):
    """another(merges=[], …): the configuration file of another base. changes: of its architecture."""

    def make(*, config=None, merges=None, **changes):
        base = shutil.copytree(tiny_base, tmp_path / "base")
        tokenizer = json.loads((base / "tokenizer.json").read_text())
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"] if merges is None else merges
        (base / "tokenizer.json").write_text(json.dumps(tokenizer))
        make_llama(base, **changes)
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps({**zero_shot, "base_model": str(base), **(config or {})}))
        return file

    return make


def test_two_models_of_other_tokens_are_compared_by_bytes(trained, sums_file, another):
    """The other one's tokenizer has no merges: each character is a token."""
    config = another(merges=[])
    result = brim.Model.load(trained).evaluate(sums_file, against=config)
    found = result.comparison
    assert set(found.differences) == {"bits_per_byte", "sequence_accuracy"}
    (note,) = found.notes
    assert note.startswith("the two models read the answers as different tokens: figures of a token are not compared")
    num_bytes = pd.read_json(sums_file, lines=True)["answer"].str.len().sum()
    assert found.metrics["bits_per_byte"] == pytest.approx(result.rows["loss"].sum() / np.log(2) / num_bytes)
    alone = brim.Model(config).evaluate(sums_file)
    assert found.other_metrics["bits_per_byte"] == pytest.approx(alone.rows["loss"].sum() / np.log(2) / num_bytes)


def test_rows_that_one_of_them_cannot_take_are_left_out_of_both(trained, sums_file, another):
    keys = {"preprocessing": {"split": "fixed", "on_overlong": "drop"}, "generation": {"max_new_tokens": 2}}
    config = another(config=keys, max_position_embeddings=8)
    model = brim.Model.load(trained, overrides=["generation.max_new_tokens=2"])
    result = model.evaluate(sums_file, with_texts=True, against=config)
    found = result.comparison
    alone = brim.Model(config).evaluate(sums_file, with_texts=True)
    assert 0 < found.num_rows == len(alone.rows) < len(result.rows) == 40
    assert found.notes == (
        f"compared on the {found.num_rows} rows that both models take; {40 - found.num_rows} are left out",
    )
    both = result.rows[result.rows["row"].isin(alone.rows["row"])]
    assert found.metrics["loss"] == pytest.approx(both["loss"].sum() / both["num_supervised"].sum())
    assert found.metrics["response_tokens"] == pytest.approx(both["num_response_tokens"].mean())
    assert found.other_metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)


def test_a_base_model_has_no_base(model, trained, sums_file):
    for base in (model, brim.Model.load(trained, overrides=["adapter=null"])):
        with pytest.raises(InputError, match="this is the base model itself"):
            base.evaluate(sums_file, against="base")
