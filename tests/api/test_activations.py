"""Activations of a data set's prompts: which rows, in which order, and as a file."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import brim
from brim.errors import DataError, InputError, OutputError, WriteError
from brim.workflows.prediction import embedding as activations

ROWS = {
    "question": ["add 3 and 4 =", "x", "add 1 and 2 = 3; the sum of", "add 10 and 12 =", "add 3 and 4 = "],
    "answer": [" 7", " 1", " 4", " 22", " 7"],
    "split": [0, 1, 2, 2, 0],
}


@pytest.fixture(scope="module")
def model(tiny_base):
    config = {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "preprocessing": {"split": "fixed"},
        "trainer": {"type": "none"},
    }
    return brim.Model(config)


@pytest.fixture(scope="module")
def hidden(tiny_base):
    """The oracle: transformers' tokenizer and hidden states [L + 1, T, D] of each prompt alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32).eval()
    states = []
    for text in ROWS["question"]:
        with torch.no_grad():
            found = base(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        states.append(torch.stack(found)[:, 0].numpy())
    return states


def test_prompts_alone_in_the_order_of_the_input(model, hidden):
    found = model.collect_activations(["last", 0], ROWS, batch_size=2)
    assert found.rows.tolist() == [0, 1, 2, 3, 4]
    assert found.num_tokens.tolist() == [states.shape[1] for states in hidden]
    assert found.widths == {"last": 32, "0": 32}
    assert (found.output, found.ledger) == (None, None)
    np.testing.assert_allclose(
        found.by_layer["last"], [states[-1].mean(axis=0) for states in hidden], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(found.by_layer["0"], [states[1].mean(axis=0) for states in hidden], rtol=1e-5, atol=1e-5)


def test_a_vector_for_each_token(model, hidden):
    found = model.collect_activations("last", ROWS, pooling=None).by_layer["last"]
    assert [vectors.shape for vectors in found] == [states[-1].shape for states in hidden]
    for vectors, states in zip(found, hidden, strict=True):
        np.testing.assert_allclose(vectors, states[-1], rtol=1e-5, atol=1e-5)


def test_a_split_alone(model, hidden):
    found = model.collect_activations(-1, ROWS, split="test", pooling="last", normalize=True)
    assert found.rows.tolist() == [2, 3]
    assert np.linalg.norm(found.by_layer["-1"], axis=1) == pytest.approx([1, 1])
    with pytest.raises(DataError, match="the split 'validation' has no rows"):
        model.collect_activations(-1, {**ROWS, "split": [0, 0, 2, 2, 0]}, split="validation")


@pytest.mark.parametrize("pooling", ["mean", None])
def test_the_file_holds_what_memory_would_hold(model, tmp_path, monkeypatch, pooling):
    monkeypatch.setattr(activations, "_BLOCK_BYTES", 4 * 32 * 20)  # several blocks; a row of more than 20 tokens alone
    held = model.collect_activations(["last", 0], ROWS, pooling=pooling)
    output = tmp_path / "new" / "vectors.parquet"
    written = model.collect_activations(["last", 0], ROWS, pooling=pooling, output=output, columns=["one", "two"])
    assert (written.by_layer, written.output, written.ledger) == ({}, output, None)
    table = pq.read_table(output)
    kind = pa.list_(pa.float32(), 32)
    kind = kind if pooling else pa.list_(kind)
    assert [(name, table.schema.field(name).type) for name in table.column_names] == [
        ("row", pa.int64()),
        ("one", kind),
        ("two", kind),
    ]
    assert table["row"].to_pylist() == [0, 1, 2, 3, 4]
    assert pq.ParquetFile(output).num_row_groups > 1 or pooling
    for column, layer in (("one", "last"), ("two", "0")):
        for row, vectors in zip(table[column].to_pylist(), held.by_layer[layer], strict=True):
            np.testing.assert_array_equal(np.array(row, dtype=np.float32), vectors)
    assert [path.name for path in output.parent.iterdir()] == ["vectors.parquet"]


def test_columns_are_called_like_the_layers(model, tmp_path):
    model.collect_activations(["last", "layers.0.mlp"], ROWS, output=tmp_path / "vectors.parquet")
    assert pq.read_schema(tmp_path / "vectors.parquet").names == ["row", "last", "layers.0.mlp"]


@pytest.mark.parametrize(("first", "most", "expected"), [
    ([0, 1, 2, 3, 4], 2, [(0, 2), (2, 4)]),
    ([0, 5, 6, 7, 20], 3, [(0, 1), (1, 3), (3, 4)]),
    ([0, 1], 9, [(0, 1)]),
    ([0], 9, []),
])  # fmt: skip
def test_blocks_of_rows(first, most, expected):
    assert list(activations._blocks(np.array(first), most)) == expected


def test_what_is_left_out_or_cut_stands_in_the_ledger(model, tmp_path):
    long = {"question": ["one", "", "x" * 300, "two"], "answer": ["a"] * 4}
    strict = brim.Model(model.config, overrides=["preprocessing.split=random"])
    with pytest.raises(DataError, match="1 of 4 rows are longer than the model's context"):
        strict.collect_activations("last", long)
    with pytest.raises(DataError, match="the prompt is empty"):
        strict.collect_activations("last", {"question": ["one", ""], "answer": ["a"] * 2})
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


@pytest.mark.parametrize("name", ["vectors.csv", "vectors"])
def test_other_formats_are_refused(model, tmp_path, name):
    with pytest.raises(OutputError, match=r"written as parquet alone(.|\n)*embeddings\.parquet"):
        model.collect_activations("last", ROWS, output=tmp_path / name)


@pytest.mark.parametrize("name", ["vectors.parquet", "vectors.parquet.ledger.parquet"])
def test_files_that_stand_there_are_left_alone(model, tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(OutputError, match="the output file exists already; nothing was changed"):
        model.collect_activations("last", ROWS, output=tmp_path / "vectors.parquet")
    assert (tmp_path / name).read_text() == "precious"


def test_what_is_wrong_leaves_no_file(model, tmp_path, monkeypatch):
    output = tmp_path / "vectors.parquet"
    with pytest.raises(InputError, match="the model has no layer 'lats'"):
        model.collect_activations("lats", ROWS, output=output)
    with pytest.raises(InputError, match="there is no pooling 'max'"):
        model.collect_activations("last", ROWS, output=output, pooling="max")

    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(activations, "_write_blocks", full)
    twice = {**ROWS, "question": ["", *ROWS["question"][1:]]}
    lenient = brim.Model(model.config, overrides=["preprocessing.on_bad_row=drop"])
    with pytest.raises(WriteError, match="the output cannot be written: No space left on device"):
        lenient.collect_activations("last", twice, output=output)
    assert list(tmp_path.iterdir()) == []
