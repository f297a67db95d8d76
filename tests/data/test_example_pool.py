"""Which rows may be examples, and how they read."""

import datetime
import hashlib

import numpy as np
import pytest

from brim.data.examples import NONE, example_pool
from brim.data.read import BATCH_ROWS, read
from brim.errors import DataError

ONE = {"type": "random", "k": 1}


def pool_of(make_config, columns, **changes):
    config = make_config(**{"prompt__task": "T", "prompt__retrieval": ONE, **changes})
    return example_pool(config, read(columns))


def examples(pool):
    return [pool.context([position]) for position in range(len(pool))]


def test_only_training_rows_with_their_answers_and_one_for_each_input(make_config):
    columns = {"q": ["one", "two", "three", "one", "four"], "a": ["1", "2", "3", "I", "4"], "split": [0, 1, 0, 0, 2]}
    pool = pool_of(make_config, columns, preprocessing__split="fixed")
    assert examples(pool) == ["[{'q': 'one', 'a': '1'}]", "[{'q': 'three', 'a': '3'}]"]
    assert pool.context([1, 0]) == "[{'q': 'three', 'a': '3'}, {'q': 'one', 'a': '1'}]"
    assert pool.positions_of(["two", "three", "one", "One", "four"]).tolist() == [NONE, 1, 0, NONE, NONE]
    assert list(pool.inputs()) == [["one", "three"]]


def test_a_context_is_what_python_writes_of_a_list_of_dicts(make_config):
    day = datetime.date(2024, 1, 31)
    columns = {
        "q": ['it\'s "so"\n{x}', "größe \\"],
        "a": [3, -1],
        "b": [True, False],
        "c": [0.5, 1e20],
        "d": [day, day],
    }
    pool = pool_of(
        make_config,
        columns,
        prompt__task=None,
        prompt__template="{__context__}{q}{b}{c}{d}",
        preprocessing__split={"type": "random", "probabilities": [1, 0, 0]},
    )
    rows = [
        {
            "q": columns["q"][row],
            "b": columns["b"][row],
            "c": columns["c"][row],
            "d": "2024-01-31",
            "a": columns["a"][row],
        }
        for row in (0, 1)
    ]
    assert pool.context([0, 1]) == str(rows)
    assert list(pool.inputs()) == [['it\'s "so"\n{x}\nTrue\n0.5\n2024-01-31', "größe \\\nFalse\n1e+20\n2024-01-31"]]


def test_features_that_name_a_column_are_called_by_their_names(make_config):
    columns = {"Frage": ["x"], "Antwort": ["y"], "more": ["z"], "split": [0]}
    changes = {"input__column": "Frage", "output__column": "Antwort", "preprocessing__split": "fixed"}
    assert examples(pool_of(make_config, columns, **changes)) == ["[{'q': 'x', 'a': 'y'}]"]
    template = {"prompt__task": None, "prompt__template": "{more}{__context__}{__sample__}"}
    assert examples(pool_of(make_config, columns, **changes, **template)) == ["[{'more': 'z', 'q': 'x', 'a': 'y'}]"]


def test_missing_cells_are_filled_or_leave_the_row_out(make_config):
    columns = {"q": ["x", None, "z"], "a": [None, "5", "6"], "split": [0, 0, 0]}
    changes = {
        "preprocessing__split": "fixed",
        "input__preprocessing": {"missing_value_strategy": "fill_with_const", "fill_value": "?"},
        "output__preprocessing": {"missing_value_strategy": "drop_row"},
    }
    assert examples(pool_of(make_config, columns, **changes)) == ["[{'q': '?', 'a': '5'}]", "[{'q': 'z', 'a': '6'}]"]


def test_sampled_out_rows_are_no_examples(make_config):
    columns = {"q": [f"q{n}" for n in range(50)], "a": ["x"] * 50}
    split = {"type": "random", "probabilities": [1, 0, 0]}
    pool = pool_of(make_config, columns, preprocessing={"sample_size": 20, "split": split})
    assert len(pool) == 20


def test_answers_that_are_no_label_of_the_category_are_no_examples(make_config):
    columns = {"q": ["x", "y", "z"], "a": ["good", "goood", " bad"], "split": [0, 0, 0]}
    match = {label: {"type": "contains", "value": label} for label in ("good", "bad")}
    changes = {
        "output__type": "category",
        "output__preprocessing": {"fallback_label": "bad"},
        "output__decoder": {"type": "category_extractor", "match": match},
    }
    pool = pool_of(make_config, columns, preprocessing__split="fixed", **changes)
    assert examples(pool) == ["[{'q': 'x', 'a': 'good'}]", "[{'q': 'z', 'a': ' bad'}]"]
    assert pool.num_unknown == 1


def test_many_rows_lie_in_several_batches_and_on_disk(make_config, monkeypatch):
    monkeypatch.setattr("brim.data.read.spill.SPILL_BYTES", 10_000)
    num_rows = 2 * BATCH_ROWS + 7
    columns = {"q": [f"q{n}" for n in range(num_rows)], "a": list(range(num_rows))}
    pool = pool_of(make_config, columns, preprocessing__split={"type": "random", "probabilities": [1, 0, 0]})
    at = [0, BATCH_ROWS - 1, BATCH_ROWS, num_rows - 1]
    assert pool.positions_of([f"q{n}" for n in at]).tolist() == at
    assert pool.context(at) == str([{"q": f"q{n}", "a": n} for n in at])
    assert sum(map(len, pool.inputs())) == num_rows


def test_an_input_is_known_by_64_bits_of_its_digest(make_config):
    pool = pool_of(make_config, {"q": ["x"], "a": ["y"], "split": [0]}, preprocessing__split="fixed")
    digest = hashlib.blake2b(b"x", digest_size=8).digest()
    assert pool._digests.tolist() == np.frombuffer(digest, "<u8").tolist()


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        (
            {"q": ["x", "x"], "a": ["1", "2"], "split": [0, 0]},
            {},
            "the given columns: the training split has 1 different inputs, and prompt.retrieval.k asks for 2 examples\n"
            "  fix: lower prompt.retrieval.k, or look at preprocessing.split",
        ),
        (
            {"q": ["x", "y"], "b": ["1", "2"], "split": [0, 0]},
            {},
            "the given columns: no column `a`, which output_features[0] names\n"
            "  expected: one of the columns that are there: `q`, `b`, `split`\n"
            "  fix: name a column of the data, or add this one",
        ),
        (
            {"q": ["x", None], "a": ["1", "2"], "split": [0, 0]},
            {"input__preprocessing__missing_value_strategy": "error"},
            "the given columns, row 1: column `q` is empty in 1 row\n  expected: a value in every row\n"
            "  fix: fill the cells, or set input_features[0].preprocessing.missing_value_strategy to drop_row or "
            "fill_with_const",
        ),
    ],
)
def test_data_without_examples_is_told(make_config, columns, changes, message):
    retrieval = {"prompt__retrieval": {"type": "random", "k": 2}}
    with pytest.raises(DataError) as caught:
        pool_of(make_config, columns, preprocessing__split="fixed", **retrieval, **changes)
    assert str(caught.value) == message
