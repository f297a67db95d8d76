"""A column whose values have no common type is text, and an error only where it is used."""

import json

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, strategies as st
from tests.properties import examples

from brim.data import prepare
from brim.data.read import json as read_jsonl, notes_on_mixed, read, require_text
from brim.errors import DataError


def write(path, content):
    path.write_text(content, encoding="utf-8")


MIXED_FILES = {
    "changed type": (
        "data.jsonl",
        '{"q": "x"}\n\n{"q": null}\n{"q": 3}\n',
        "data.jsonl:4: column `q` changes its type: a number here, text in data.jsonl:1\n"
        "  expected: one type in all rows of a column\n"
        "  fix: write all of its values in the same type, e.g. all as text; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "true among numbers": (
        "data.jsonl",
        '{"q": 1}\n{"q": true}\n',
        "data.jsonl:2: column `q` changes its type: true or false here, a number in data.jsonl:1\n"
        "  expected: one type in all rows of a column\n"
        "  fix: write all of its values in the same type, e.g. all as text; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "huge number": (
        "data.jsonl",
        '{"q": 1}\n{"q": 99999999999999999999}\n',
        "data.jsonl:2: column `q` holds a whole number beyond 64 bits\n  fix: write it as text, in quotes; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "huge number among fractions": (
        "data.jsonl",
        '{"q": 0.5}\n{"q": 9007199254740993}\n',
        "data.jsonl:2: column `q` holds fractions and a whole number beyond 53 bits, which would be rounded\n"
        "  fix: write all of its values as text, in quotes; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "lists among objects": (
        "data.json",
        '[{"q": {}}, {"q": []}]',
        "data.json, row 1: column `q` changes its type: a list here, an object in data.json, row 0\n"
        "  expected: one type in all rows of a column\n"
        "  fix: write all of its values in the same type, e.g. all as text; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
}
MIXED_DATA = {
    "changed type": (
        {"q": ["x", None, 3]},
        "the given columns, row 2: column `q` changes its type: a number here, text in the given columns, row 0\n"
        "  expected: one type in all rows of a column\n"
        "  fix: write all of its values in the same type, e.g. all as text; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "shapes": (
        {"q": [[1], [2], ["x"]]},
        "the given columns, row 2: column `q` holds values of different shapes "
        "(Could not convert 'x' with type str: tried to convert to int64)\n"
        "  expected: lists and objects of the same shape in all rows",
    ),
    "frame of mixed types": (
        pd.DataFrame({"q": ["x", 3]}),
        "the data frame, row 1: column `q` changes its type: a number here, text in the data frame, row 0\n"
        "  expected: one type in all rows of a column\n"
        "  fix: write all of its values in the same type, e.g. all as text; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
}


def require_mixed(source, message):
    with pytest.raises(DataError) as caught:
        require_text(source, ["q"])
    assert str(caught.value) == message
    assert [note.endswith("; it is not used, and was read as text") for note in notes_on_mixed(source, [])] == [True]
    assert notes_on_mixed(source, ["q"]) == []


@pytest.mark.parametrize(("name", "content", "message"), MIXED_FILES.values(), ids=MIXED_FILES)
def test_a_column_of_mixed_types_in_a_file_is_an_error_for_who_uses_it(tmp_path, monkeypatch, name, content, message):
    write(tmp_path / name, content)
    require_mixed(read(tmp_path / name), message)
    monkeypatch.setattr("brim.data.read.spill.SPILL_BYTES", 0)
    require_mixed(read(tmp_path / name), message)
    require_mixed(read(tmp_path / name), message)  # from the copy that was kept


@pytest.mark.parametrize(("data", "message"), MIXED_DATA.values(), ids=MIXED_DATA)
def test_a_column_of_mixed_types_in_memory_is_an_error_for_who_uses_it(data, message):
    require_mixed(read(data), message)


@pytest.mark.parametrize("batch_rows", [1, 2, 4096])
def test_what_is_mixed_or_nested_is_read_as_text(tmp_path, monkeypatch, batch_rows):
    monkeypatch.setattr("brim.data.read.columns.BATCH_ROWS", batch_rows)
    rows = [
        {"q": "x", "id": 1, "meta": {"a": 1}},
        {"q": "y", "id": "31", "meta": None, "late": [1, "ü"]},
        {"q": "z", "id": True, "meta": {"b": {"c": 0.5}}},
        {"q": "ü", "id": {"n": [1]}},
    ]
    write(tmp_path / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    source = read(tmp_path / "data.jsonl")
    assert source.table.to_pydict() == {
        "q": ["x", "y", "z", "ü"],
        "id": ["1", "31", "true", '{"n": [1]}'],
        "meta": ['{"a": 1}', None, '{"b": {"c": 0.5}}', None],
        "late": [None, '[1, "ü"]', None, None],
    }
    require_text(source, ["q"])
    with pytest.raises(DataError) as caught:
        require_text(source, ["id", "meta", "late"])
    assert [problem.what for problem in caught.value.problems] == [
        "column `id` changes its type: text here, a number in data.jsonl:1",
        "column `meta` holds objects, which are no text",
        "column `late` holds lists, which are no text",
    ]
    assert notes_on_mixed(source, ["q"]) == [
        "data.jsonl:2: column `id` changes its type: text here, a number in data.jsonl:1; "
        "it is not used, and was read as text"
    ]


def test_reading_starts_over_once_however_often_types_change(tmp_path, monkeypatch):
    monkeypatch.setattr("brim.data.read.columns.BATCH_ROWS", 2)
    rows = [{"q": "x", f"k{number // 3}": number if number % 2 else "x"} for number in range(40)]
    write(tmp_path / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    opened = []
    lines = read_jsonl._lines
    monkeypatch.setattr(read_jsonl, "_lines", lambda path: opened.append(path) or lines(path))
    assert read(tmp_path / "data.jsonl").table.num_columns == 15
    assert len(opened) == 3  # types, values, and once for the lines to name


@given(
    values=st.lists(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text("aü1"), min_size=1
    )
)
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_column_of_one_type_keeps_its_values_and_another_its_text(tmp_path, values):
    path = tmp_path / "data.jsonl"
    write(path, "".join(json.dumps({"q": value, "x": "x"}) + "\n" for value in values))
    column = read(path).table["q"]
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        assert repr(column.to_pylist()) == repr(values)
    elif kinds == {int, float} and not pa.types.is_string(column.type):
        assert repr(column.to_pylist()) == repr([None if value is None else float(value) for value in values])
        assert all(value == int(float(value)) for value in values if isinstance(value, int))
    else:
        texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        assert column.to_pylist() == texts


def test_a_mixed_column_that_nobody_reads_is_a_note(tmp_path, encoder, make_config):
    write(tmp_path / "data.jsonl", '{"q": "x", "a": "y", "id": 1}\n{"q": "x", "a": "y", "id": "31"}\n' * 10)
    done = prepare(read(tmp_path / "data.jsonl"), make_config(), encoder, context_length=64)
    assert (
        "data.jsonl:2: column `id` changes its type: text here, a number in data.jsonl:1; "
        "it is not used, and was read as text"
    ) in done.notes
    for changes in ({"input__name": "id"}, {"preprocessing__split": {"type": "hash", "column": "id"}}):
        with pytest.raises(DataError, match=r"data\.jsonl:2: column `id` changes its type"):
            prepare(read(tmp_path / "data.jsonl"), make_config(**changes), encoder, context_length=64)
