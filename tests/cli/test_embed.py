"""`brim embed`, as a person types it."""

import json

import numpy as np
import pyarrow.parquet as pq


def test_vectors_in_the_order_of_the_input(brim, project, finished_run):
    done = brim("embed", finished_run, "--dataset", "sums.jsonl", "--output", "new/emb.parquet")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("40 rows, ")
    assert ", 32 numbers a vector, in " in lines[0]
    assert lines[1:] == ["embeddings: new/emb.parquet"]
    table = pq.read_table("new/emb.parquet")
    assert table.column_names == ["row", "embedding"]
    assert table["row"].to_pylist() == list(range(40))


def test_options_and_json(brim, project, finished_run):
    common = ("embed", finished_run, "--dataset", "sums.jsonl", "--split", "validation", "--json")
    done = brim(*common, "--output", "one.parquet", "--layer", "-1", "--pooling", "last", "--normalize")
    told = json.loads(done.out)
    num_tokens = told.pop("num_tokens")
    assert told.pop("seconds") > 0
    assert told == {
        "output": "one.parquet",
        "ledger": None,
        "layer": "-1",
        "pooling": "last",
        "normalized": True,
        "width": 32,
        "num_rows": 4,
    }
    vectors = np.array(pq.read_table("one.parquet")["embedding"].to_pylist())
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), np.ones(4), rtol=1e-5)

    by_token = brim(*common, "--output", "two.parquet", "--layer", "layers.0.mlp", "--pooling", "none")
    assert json.loads(by_token.out)["pooling"] is None
    rows = pq.read_table("two.parquet")["embedding"].to_pylist()
    assert sum(map(len, rows)) == num_tokens


def test_what_is_wrong_is_told_and_nothing_is_written(brim, project, finished_run):
    common = ("embed", finished_run, "--dataset", "sums.jsonl")
    for options, words in [
        (("--output", "a.csv"), "vectors are written as parquet alone"),
        (("--output", "a.parquet", "--layer", "layers.9"), "the model has no layer 'layers.9'"),
        (("--output", "a.parquet", "--layer", "7"), "0 to 1, or -1 to -2 counted from the end"),
        (("--output", "a.parquet", "--pooling", "max"), "there is no pooling 'max'"),
        (("--output", "a.parquet", "--split", "dev"), "there is no split 'dev'"),
        (("--output", "config.yaml"), "vectors are written as parquet alone"),
    ]:
        done = brim(*common, *options)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
    assert not (project / "a.parquet").exists()
    assert brim(*common, "--output", "a.parquet").code == 0
    before = (project / "a.parquet").read_bytes()
    again = brim(*common, "--output", "a.parquet")
    assert again.code == 2
    assert "the output file exists already; nothing was changed" in again.err
    assert (project / "a.parquet").read_bytes() == before
