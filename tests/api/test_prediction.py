"""Predictions: the input's rows in their order, its columns as they were, in three formats that say the same."""

import datetime
import json
import math

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

import brim
from brim.data.read import read
from brim.workflows.prediction import check_output, write_predictions

ADDED = ["answer_response", "finish_reason", "num_prompt_tokens", "num_response_tokens"]


@pytest.fixture
def model(zero_shot):
    return brim.Model(zero_shot)


@pytest.fixture
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


def test_a_response_stands_beside_its_row(model, table):
    result = model.predict(table)
    frame = result.predictions
    assert list(frame) == ["row", *table.column_names, *ADDED]
    assert frame["row"].tolist() == list(range(6))
    assert frame["question"].tolist() == table["question"].to_pylist()
    alone = [model.generate(prompt) for prompt in table["question"].to_pylist()]
    assert frame["answer_response"].tolist() == alone
    assert result.output is None
    assert result.seconds > 0


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_files_hold_what_the_frame_holds(model, table, tmp_path, ending):
    path = tmp_path / "new" / f"predictions.{ending}"
    result = model.predict(table, output=path)
    assert result.output == path
    assert sorted(file.name for file in path.parent.iterdir()) == [
        f".{path.name}.job",
        path.name,
        f"{path.name}.summary.json",
    ]
    back = read(path).table
    assert back.column_names == list(result.predictions)
    for name in ("row", "question", *ADDED):
        assert back[name].to_pylist() == result.predictions[name].tolist()


def test_parquet_keeps_types_and_missing_cells(model, table, tmp_path):
    model.predict(table, output=tmp_path / "p.parquet")
    back = pq.read_table(tmp_path / "p.parquet")
    for name in table.column_names:
        assert back[name].to_pylist() == table[name].to_pylist()


def test_jsonl_keeps_numbers_whole_and_exact(model, table, tmp_path):
    model.predict(table, output=tmp_path / "p.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in ("id", "weight", "question", "sure", "tags"):
        assert [row[name] for row in rows] == table[name].to_pylist()
    assert [row["on"] for row in rows] == ["2024-01-31"] * 5 + [None]
    assert "größer? 数" in (tmp_path / "p.jsonl").read_text(encoding="utf-8")


def test_csv_keeps_whole_numbers_beside_empty_cells(model, table, tmp_path):
    model.predict(table, output=tmp_path / "p.csv")
    text = pd.read_csv(tmp_path / "p.csv", dtype=str, keep_default_na=False)
    assert text["id"].tolist() == ["5", "3", "", str(2**60 + 1), "0", "-1"]
    assert text["weight"].tolist() == ["0.1234567890123456", "1e-300", "", "3.0", "-0.0", "1e+22"]
    assert text["on"].tolist() == ["2024-01-31"] * 5 + [""]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_any_text_survives_each_format(tmp_path_factory, ending, texts):
    path = tmp_path_factory.mktemp("texts") / f"p.{ending}"
    write_predictions(pd.DataFrame({"row": range(len(texts)), "text": [f"<{text}>" for text in texts]}), path)
    table = read(path).table
    assert table["text"].to_pylist() == [f"<{text}>" for text in texts]


def test_jsonl_is_json_even_where_a_figure_is_none(tmp_path):
    write_predictions(
        pd.DataFrame({"a": [1.5, math.nan], "b": [pd.Timestamp("2024-01-31 12:00"), pd.NaT]}), tmp_path / "p.jsonl"
    )
    lines = (tmp_path / "p.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"a": 1.5, "b": "2024-01-31 12:00:00"},
        {"a": None, "b": None},
    ]


def test_dropped_rows_are_left_out_and_the_others_keep_their_numbers(zero_shot, tmp_path):
    feature = {"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}
    said = []
    result = brim.Model({**zero_shot, "input_features": [feature]}).predict(
        pd.DataFrame({"id": ["a", "b", "c", "d"], "question": ["x", None, "y", None]}), say=said.append
    )
    assert result.predictions["row"].tolist() == [0, 2]
    assert result.predictions["id"].tolist() == ["a", "c"]
    assert result.left_out["row"].tolist() == [1, 3]
    assert set(result.left_out["reason"]) == {"dropped_missing"}
    assert all(result.left_out["why"].str.contains("question"))
    assert (len(result), result.num_left_out) == (2, {"dropped_missing": 2})
    assert result.predictions.attrs["left_out"] == {"dropped_missing": [1, 3]}
    first, second = repr(result).splitlines()
    assert first == "PredictResult: 2 of 4 rows, in memory"
    assert second.startswith("  2 were dropped: a cell that the prompt or the answer needs is missing (row 1, 3; see")
    assert any(line.startswith("2 ") for line in said)


def test_with_all_rows_dropped_there_are_no_predictions(zero_shot, tmp_path):
    feature = {"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}
    model = brim.Model({**zero_shot, "input_features": [feature]})
    result = model.predict(pa.table({"question": pa.array([None, None], pa.string())}), output=tmp_path / "p.parquet")
    assert len(result.predictions) == 0
    assert pq.read_table(tmp_path / "p.parquet").column_names == ["row", "question", *ADDED]


def test_where_no_row_is_left_out_nothing_is_said_of_it(model, table, tmp_path):
    result = model.predict(table, output=tmp_path / "p.jsonl")
    assert repr(result) == f"PredictResult: 6 rows, {tmp_path / 'p.jsonl'}"
    assert (result.left_out.empty, result.num_left_out) == (True, {})


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_training_and_evaluation_say_which_rows_were_not_used(zero_shot, verb):
    preprocessing = {"split": {"type": "random", "probabilities": [0.5, 0.25, 0.25]}}
    feature = {"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}
    model = brim.Model({**zero_shot, "input_features": [feature], "preprocessing": preprocessing})
    rows = pd.DataFrame({"question": ["x", None, "y", None] * 5, "answer": ["z"] * 20})
    result = getattr(model, verb)(rows)
    used = sum(result.num_rows.values()) if verb == "train" else len(result.rows)
    assert (used, result.num_left_out) == (10, {"dropped_missing": 10})


def test_predictions_do_not_depend_on_the_batch(zero_shot, table):
    def responses(rows):
        return brim.Model({**zero_shot, "trainer": {"type": "none", "batch_size": rows}}).predict(table).predictions

    pd.testing.assert_frame_equal(responses(1), responses(6))


def test_progress_counts_batches_of_the_configurations_size(zero_shot, table):
    done = []
    brim.Model({**zero_shot, "trainer": {"type": "none", "batch_size": 4}}).predict(table, on_batch=done.append)
    assert done == [4, 2]


def test_a_split_is_predicted_alone(model, sums_file):
    every = model.predict(sums_file).predictions
    test = model.predict(sums_file, split="test").predictions
    assert test["row"].tolist() == [8, 9, 18, 19, 28, 29, 38, 39]
    expected = every[every["split"] == 2].reset_index(drop=True)
    pd.testing.assert_frame_equal(test, expected)


def test_generation_settings_of_a_call_are_for_that_call(model, table):
    before = model.predict(table).predictions
    longer = model.predict(table, generation={"max_new_tokens": 12}).predictions
    assert longer["num_response_tokens"].max() == 12
    pd.testing.assert_frame_equal(model.predict(table).predictions, before)
    with pytest.raises(brim.ConfigError, match=r"unknown key generation.max_tokens"):
        model.predict(table, generation={"max_tokens": 3})


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        (["row"], "the data has a column `row`, a name that predictions use themselves"),
        (
            ["answer_response", "finish_reason"],
            "columns `answer_response`, `finish_reason`, names that predictions use",
        ),
    ],
)
def test_columns_of_the_same_name_are_not_written_over(model, table, tmp_path, taken, message):
    for name in taken:
        table = table.append_column(name, pa.array([0] * 6))
    with pytest.raises(brim.DataError, match=message):
        model.predict(table, output=tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()


def test_a_template_is_filled_and_the_answer_is_not_needed(zero_shot):
    model = brim.Model({**zero_shot, "prompt": {"template": "add {a} and {b} ="}})
    result = model.predict({"a": [1, 2], "b": [2, 2]})
    assert result.predictions["answer_response"].tolist() == model.generate(["add 1 and 2 =", "add 2 and 2 ="])


@pytest.mark.parametrize("name", ["p.txt", "p", "p.CSV", ".csv"])
def test_the_ending_says_the_format(tmp_path, name):
    with pytest.raises(brim.OutputError, match=r"ending.*\n  expected: \.parquet, \.jsonl, \.csv"):
        check_output(tmp_path / name)


def test_an_existing_file_is_refused_before_anything_is_done(model, tmp_path):
    (tmp_path / "p.csv").write_text("mine")
    with pytest.raises(brim.OutputError, match="the output file exists already; nothing was changed"):
        model.predict("no such data", output=tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text() == "mine"


def test_a_failed_write_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(brim.WriteError, match="the output cannot be written: No space left on device"):
        write_predictions(pd.DataFrame({"a": [1]}), tmp_path / "p.csv")
    assert list(tmp_path.iterdir()) == []


TALKS = [
    [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2", "weight": 0}],
    [{"role": "user", "content": "zwölf"}],
]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "frame"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_lists_and_objects_come_out_as_they_went_in(model, tmp_path, form, ending):
    """In csv as JSON; a key that some objects lack is null in them where the format has one type for all."""
    frame = pd.DataFrame({"question": ["a", "b"], "messages": TALKS, "about": [{"n": 1, "tags": ["x", "y"]}, None]})
    data = frame
    if form == "jsonl":
        data = tmp_path / "data.jsonl"
        records = frame.to_dict("records")
        data.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records), encoding="utf-8")
    elif form == "parquet":
        data = tmp_path / "data.parquet"
        frame.to_parquet(data)
    path = tmp_path / f"out.{ending}"
    result = model.predict(data, output=path)
    if ending == "jsonl":
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    elif ending == "parquet":
        found = pq.read_table(path).to_pylist()
    else:
        found = pd.read_csv(path).to_dict("records")
        for record in found:
            record["messages"] = json.loads(record["messages"])
            record["about"] = json.loads(record["about"]) if isinstance(record["about"], str) else None

    def without_nulls(talk):
        return [{name: value for name, value in turn.items() if value is not None} for turn in talk]

    for records in (found, result.predictions.to_dict("records")):
        assert [without_nulls(record["messages"]) for record in records] == TALKS
        assert [record["about"] for record in records] == [{"n": 1, "tags": ["x", "y"]}, None]


def test_objects_whose_keys_differ_from_row_to_row_stay_json_in_parquet(model, tmp_path):
    frame = pd.DataFrame({"question": ["a"] * 80, "about": [json.dumps({f"key{n}": n}) for n in range(80)]})
    data = tmp_path / "data.jsonl"
    frame["about"] = frame["about"].map(json.loads)
    data.write_text("".join(json.dumps(each) + "\n" for each in frame.to_dict("records")), encoding="utf-8")
    model.predict(data, output=tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [json.loads(record["about"]) for record in found] == frame["about"].tolist()
