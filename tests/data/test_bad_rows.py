"""Bad rows in every format: an error with the exact place, or left out and named, with all others as they were."""

import json
import math
import re
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from faults.rows import BAD, KINDS, file_of, place_of
from faults.workshop import ROWS
from hypothesis import HealthCheck, assume, given, strategies as st
from tests.data.conftest import ALL_TRAIN, jsonl, texts_of
from tests.messages import refused
from tests.properties import examples

from brim.config.schema import Config, PreprocessingConfig
from brim.data import prepare, prompts_of
from brim.data.read import cell_texts, read
from brim.data.usable import usable
from brim.errors import DataError

HALF = "column `q` holds half of a character (a lone surrogate such as \\ud83d), which no text can hold"
GOOD = [number for number in range(len(ROWS)) if number not in BAD]


def line(**cells):
    return json.dumps(cells)


def entries(ledger):
    return [(entry.key, entry.split, entry.event, entry.why) for entry in ledger]


@pytest.fixture(scope="session")
def prepared(prepared):
    return partial(prepared, context_length=64)


DROP = {"preprocessing__on_bad_row": "drop"}


def config_of(sections):
    """The workshop's columns, all rows to train on; sections: of the configuration."""
    features = [[{"name": name, "type": "text"}] for name in ("question", "answer")]
    config = {"base_model": "base", "input_features": features[0], "output_features": features[1], **sections}
    split = {"type": "random", "probabilities": [1.0, 0.0, 0.0]}
    config["preprocessing"] = {"split": split, **config.get("preprocessing", {})}
    return Config.model_validate({**config, "adapter": "lora", "trainer": {"type": "finetune"}})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_bad_row_of_a_file_is_left_out_and_named_or_an_error_with_its_place(tmp_path, encoder, kind):
    for ending in kind.endings:
        file = tmp_path / f"bad.{ending}"
        file.write_bytes(file_of(kind, ending))
        made = prepare(read(file), config_of(kind.policy), encoder, context_length=64)
        assert made.splits["train"].keys.tolist() == GOOD
        assert [(entry.key, entry.event) for entry in made.ledger] == [(row, kind.event) for row in BAD]
        assert all(kind.says in entry.why for entry in made.ledger)
        (summary,) = made.ledger.summary()
        assert summary.startswith(f"{len(BAD)} of {len(ROWS)} rows were dropped")
        with pytest.raises(DataError) as caught:
            prepare(read(file), config_of(kind.strict), encoder, context_length=64)
        where = caught.value.problems[0].where.replace(" (564 tokens)", "")
        assert where in (", ".join(place_of(row, file.name) for row in BAD), place_of(BAD[0], file.name))
        assert any("preprocessing" in problem.fix for problem in caught.value.problems)
        if kind.event != "dropped_bad":
            continue
        assert [entry.why.split(": ")[0] for entry in made.ledger] == [place_of(row, file.name) for row in BAD]
        assert summary.count(": ".join(entries(made.ledger)[0][3].split(": ")[:2])) == 1
        good = [(ROWS[row]["question"], ROWS[row]["answer"]) for row in GOOD]
        assert texts_of(config_of(kind.policy), read(file)) == good
        asked = prompts_of(read(file), config_of(kind.policy), encoder).rows.keys.tolist()
        assert asked == (list(range(len(ROWS))) if kind.column == "answer" else GOOD)  # answers are not asked for
        problem, told = caught.value.problems[0], kind.says.split("`")
        assert kind.says in problem.what or problem.what.startswith(f"column `{told[1]}` changes its type: ")
        assert caught.value.problems[-1].fix.endswith("preprocessing.on_bad_row: drop to go on without such rows")


@pytest.mark.parametrize(("values", "what"), [
    ([*"wxyz", b"v"], "column `q` holds bytes here and text in most rows"),
    ([1, 2, 3, 4, "x"], "column `q` holds text here and a number in most rows"),
    ([*"wxyz", "\ud83d"], HALF),
])  # fmt: skip
def test_a_bad_row_in_memory(prepared, values, what):
    columns = {"q": values, "a": list("abcde")}
    for source in map(read, (columns, pd.DataFrame(columns, dtype=object))):
        made = prepared(source, **DROP)
        assert made.splits["train"].keys.tolist() == [0, 1, 2, 3]
        assert entries(made.ledger) == [(4, None, "dropped_bad", f"{source.name}, row 4: {what}")]
        with pytest.raises(DataError, match=f"{source.name}, row 4: column `q`"):
            prepared(source)


def test_text_that_is_not_utf8_in_tables_and_within_lists_and_damaged_columns():
    damaged = pa.array([b"x", b"y", b"z\xff"], type=pa.binary()).view(pa.string())  # as other writers leave it
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), damaged)
    for column, texts in ((damaged, ["x", "y", None]), (lists, [["x"], ["y"], None])):
        source = read(pa.table({"q": list("abc"), "tags": column}))
        told = {row: problem.what for row, problem in source.faults.items()}
        assert told == {2: "column `tags` holds bytes that are not UTF-8 text"}
        assert source.table["tags"].to_pylist() == texts
    offsets, texts = pa.py_buffer(np.array([0, 900, 3], np.int32)), pa.py_buffer(b"xyz")
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, texts])
    with refused("the table: column `q` is damaged: … write or download the data again", by=DataError):
        read(pa.table({"q": column}))


def test_names_that_no_table_can_have(tmp_path):
    for name in ("\0fault", "\ud83d"):
        with refused("the given columns: column names that are not text: `", by=DataError):
            read({name: ["x"]})
        (tmp_path / "data.jsonl").write_text(json.dumps({name: "x"}) + '\n{"q": "x"}\n')
        assert list(read(tmp_path / "data.jsonl").faults) == [0]


def test_most_rows_may_not_be_bad_but_the_first_may(tmp_path, prepared):
    (tmp_path / "data.jsonl").write_text("{\n" * 19 + '{"q": "x"}\n' * 19)
    assert list(read(tmp_path / "data.jsonl").faults) == list(range(19))
    for name, content in (("data.jsonl", "{broken\n[1]\n"), ("data.json", "[1, 2]"), ("data.csv", "q,a\n1\n2\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match="2 of 2 rows are bad, more than") as caught:
            read(tmp_path / name)
        assert len(caught.value.problems) == 3
    file = tmp_path / "data.jsonl"  # a column of which most is no text is the wrong one
    for values, words in [
        (["x", [1], "x", [1], [1]], "column `q` holds lists, which are not text"),
        ([*["x", 1, True, "x"] * 2, 1, True], "6 of 10 rows are bad, more than preprocessing.on_bad_row: drop leaves out"),
    ]:  # fmt: skip
        file.write_text(jsonl(*({"q": value, "a": "y"} for value in values)))
        with pytest.raises(DataError, match=re.escape(words)):
            prepared(file, **DROP)


def test_a_bad_row_is_in_no_split_and_not_sampled(tmp_path, prepared):
    rows = [line(q=f"q{number}", a="x", split=number % 3) for number in range(30)]
    bad = {3: "{broken", 7: line(q="x", a="x"), 8: line(q="x", a="x", split="1"), 20: line(q=3, a="x", split=0)}
    (tmp_path / "data.jsonl").write_text("\n".join(bad.get(number, row) for number, row in enumerate(rows)))
    fixed = {**DROP, "preprocessing__split": {"type": "fixed"}}
    with pytest.raises(DataError, match=r"column `split`, by which the data is split, is empty in 1 row"):
        prepared(tmp_path / "data.jsonl", **fixed)  # a split that is missing is no fault of the row's form
    rows[7] = bad.pop(7)[:-1] + ', "split": 1}'
    (tmp_path / "data.jsonl").write_text("\n".join(bad.get(number, row) for number, row in enumerate(rows)))
    source = read(tmp_path / "data.jsonl")
    made = prepared(source, **fixed)
    for split, part in enumerate(("train", "validation", "test")):
        assert made.splits[part].keys.tolist() == [key for key in range(30) if key % 3 == split and key not in bad]
    assert [(entry.key, entry.split) for entry in made.ledger] == [(3, None), (8, None), (20, None)]
    test = prepared(source, only="test", **fixed)
    assert test.splits["test"].keys.tolist() == made.splits["test"].keys.tolist()
    assert test.ledger.num_rows == 8 + 3
    assert len(prepared(source, **DROP, preprocessing__sample_size=26).splits["train"]) == 26


def test_a_template_that_does_not_fit_a_row(prepared):
    source, template = read({"n": ["1", "x", "3"], "a": ["y", "z", "w"]}), {"prompt__template": "{n:.2f}"}
    made = prepared(source, **template, **DROP)
    what = "column n holds 'x', which the format {n:.2f} of prompt.template does not fit"
    assert entries(made.ledger) == [(1, "train", "dropped_bad", f"the given columns, row 1: {what}")]
    assert made.splits["train"].keys.tolist() == [0, 2]
    words = f"the given columns, row 1: {what} … a number … set preprocessing.on_bad_row: drop to go on"
    with refused(words, by=DataError):
        prepared(source, **template)


LONG = {"q": ["a", "b" * 30, "c", "d" * 9], "a": ["x"] * 4}  # with <s> and </s>: 4, 33, 4 and 12 tokens


def test_overlong_rows_are_dropped_or_cut_as_by_a_global_length_of_the_context(prepared):
    made = prepared(LONG, context_length=12, preprocessing__on_overlong="drop")
    assert made.splits["train"].keys.tolist() == [0, 2, 3]
    why = "preprocessing.on_overlong is drop, and the context is 12 tokens"
    assert entries(made.ledger) == [(1, "train", "dropped_overlong", why)]
    assert [(entry.tokens_before, entry.tokens_after) for entry in made.ledger] == [(33, 0)]
    short = "the model's context is too short for them: the longest of 33 tokens"
    assert made.ledger.summary() == [f"1 of 4 rows were dropped, since {short} ({why})"]
    ways = ({"preprocessing__on_overlong": "truncate"}, {"preprocessing__global_max_sequence_length": 12})
    drops = {"context_length": 12, "preprocessing__drop_unlearnable": True}
    made, expected = (prepared(LONG, **way, **drops) for way in ways)
    assert made.splits["train"].keys.tolist() == expected.splits["train"].keys.tolist() == [0, 2, 3]
    for row, other in zip(made.splits["train"], expected.splits["train"], strict=True):
        assert row.input_ids.tolist() == other.input_ids.tolist()
    told = [(e.key, e.event, e.tokens_before, e.tokens_after) for e in made.ledger]
    assert told == [(1, "cut_joined", 33, 12), (1, "dropped_unlearnable", 12, 0)]
    assert made.ledger.entries[0].why == "preprocessing.on_overlong is truncate, and the context is 12 tokens"
    lengths = {"preprocessing__global_max_sequence_length": 10, "input__preprocessing__max_sequence_length": 9}
    for policy in ("error", "drop", "truncate"):
        made = prepared(LONG, context_length=12, preprocessing__on_overlong=policy, **lengths)
        assert made.splits["train"].lengths.tolist() == [4, 10, 4, 10]
        assert {entry.event for entry in made.ledger} == {"cut_prompt", "cut_joined"}


def _many(num_rows, overlong=(), unlearnable=()):
    """Rows of which some are longer than a context of 64 tokens, and some have nothing to learn from under a cut."""
    lengths = {**dict.fromkeys(overlong, 90), **dict.fromkeys(unlearnable, 40)}
    return {"q": ["b" * lengths.get(row, 3) for row in range(num_rows)], "a": ["x"] * num_rows}


def test_a_few_overlong_or_unlearnable_rows_are_left_out_of_training_counted_and_named(prepared):
    """5 of 1,000 are what a person would leave out; none of them was asked about."""
    left_out = (7, 400, 401, 500, 999)
    made = prepared(_many(1000, overlong=left_out))
    assert len(made.splits["train"]) == 995
    assert [(e.key, e.event) for e in made.ledger] == [(key, "dropped_overlong") for key in left_out]
    limit = "preprocessing.max_dropped_fraction 0.01 leaves out up to 10"
    places = ", ".join(f"the given columns, row {row}" for row in left_out[:3])
    assert made.ledger.summary() == [
        "5 of 1,000 rows were dropped, since the model's context is too short for them: the longest of 93 tokens "
        f"({places} and 2 more, {limit}, and the context is 64 tokens)"
    ]
    made = prepared(_many(200, unlearnable=(3, 5)), preprocessing__global_max_sequence_length=30)
    assert sorted(made.splits["train"].keys.tolist()) == [row for row in range(200) if row not in (3, 5)]
    assert made.ledger.summary()[1:] == [
        "2 of 200 rows were dropped: nothing of the answer is left to learn from (the given columns, row 3, the given "
        "columns, row 5, preprocessing.max_dropped_fraction 0.01 leaves out up to 2)"
    ]


@given(
    num_rows=st.integers(1, 60),
    overlong=st.sets(st.integers(0, 59), max_size=6),
    fraction=st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.29, 1.0]),
)
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_more_than_the_share_is_an_error_and_no_more_rows_are_ever_missing(prepared, num_rows, overlong, fraction):
    overlong = {row for row in overlong if row < num_rows}
    assume(len(overlong) < num_rows)
    share = {"preprocessing__max_dropped_fraction": fraction}
    most = round(fraction * 100) * num_rows // 100
    if len(overlong) <= most:
        made = prepared(_many(num_rows, overlong), **share)
        assert set(made.splits["train"].keys.tolist()) == set(range(num_rows)) - overlong
        return
    with pytest.raises(DataError) as caught:
        prepared(_many(num_rows, overlong), **share)
    (problem,) = caught.value.problems
    more = f", more than the {most:,} that preprocessing.max_dropped_fraction leaves out" if most else ""
    assert problem.what == f"{len(overlong)} of {num_rows} rows are longer than the model's context{more}"


def test_what_is_said_to_be_an_error_is_one_for_a_single_row(prepared):
    kept = {"preprocessing__drop_unlearnable": False, "preprocessing__global_max_sequence_length": 30}
    for keys, what in (
        ({"preprocessing__on_overlong": "error"}, "… 1 of 200 rows are longer than the model's context"),
        (kept, "… 1 of 200 rows have nothing to learn from: no token of the answer is left"),
    ):
        with refused(what, by=DataError):
            prepared(_many(200, overlong=(3,)), **keys)


@pytest.mark.parametrize("trainer", [{"type": "finetune"}, {"type": "none"}])
def test_an_evaluation_leaves_out_what_training_left_out(prepared, trainer):
    """All three stand in one split, of whose rows alone they would be too many."""
    of_parts = {"preprocessing__split": {"type": "fixed", "column": "part"}, "trainer": trainer}
    data = {**_many(300, overlong=(3, 8, 9)), "part": [0] * 100 + [1] * 100 + [2] * 100}
    for name, rows in prepared(data, **of_parts).splits.items():
        alone = prepared(data, only=name, **of_parts)
        assert alone.splits[name].keys.tolist() == rows.keys.tolist()
        assert len(alone.ledger.left_out()) == (3 if name == "train" else 0)
    whole = prepared(data, only="full", **of_parts)
    assert len(whole.splits["full"]) == 297
    assert "row 3, the given columns, row 8" in whole.ledger.summary()[0]
    for only in (None, "full", "train"):
        with pytest.raises(DataError, match="more than the 3 that preprocessing"):
            prepared({**data, **_many(300, overlong=(3, 8, 9, 10))}, only=only, **of_parts)


def _of_all_kinds(tmp_path, num_rows):
    """A broken line, a number for a text, a prompt that the template cannot fill, a long row and an unlearnable one."""
    columns = _many(num_rows, overlong=(3,), unlearnable=(5,))
    rows = [{"q": q, "a": a} for q, a in zip(columns["q"], columns["a"], strict=True)]
    rows[7]["q"] = 3
    lines = [json.dumps(row) for row in rows]
    lines[9] = "{broken"
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return read(tmp_path / "data.jsonl")


def test_all_kinds_of_unusable_rows_count_together(tmp_path, prepared):
    cut = {"output__preprocessing__max_sequence_length": 64, "preprocessing__global_max_sequence_length": 30}
    made = prepared(_of_all_kinds(tmp_path, 400), **cut)
    events = dict.fromkeys((3, 5), "dropped_unlearnable") | dict.fromkeys((7, 9), "dropped_bad")
    assert {entry.key: entry.event for entry in made.ledger.left_out()} == events
    limit = "preprocessing.max_dropped_fraction 0.01 leaves out up to 4"
    (bad,) = [line for line in made.ledger.summary() if "cannot be read" in line]
    assert bad == (
        "2 of 400 rows were dropped, since they cannot be read or used (data.jsonl:8: column `q` holds a number here and "
        "text in most rows; data.jsonl:10: not valid JSON: Expecting property name enclosed in double quotes at "
        f"character 2; {limit})"
    )
    more = "… 2 of 397 rows have nothing to learn from … more than the 3 that preprocessing.max_dropped_fraction leaves out"
    with refused("data.jsonl:8: ", "data.jsonl:10: … (preprocessing.max_dropped_fraction leaves out up to 3)", more):
        prepared(_of_all_kinds(tmp_path, 399), **cut)
    assert len(prepared(_of_all_kinds(tmp_path, 399), **cut, **DROP).splits["train"]) == 395  # then they do not count
    with pytest.raises(DataError, match=r"data\.jsonl:10: not valid JSON"):
        prepared(_of_all_kinds(tmp_path, 400), **cut, preprocessing__on_bad_row="error")


def test_a_prediction_leaves_no_row_out_unasked(tmp_path, prepared, encoder, make_config):
    (tmp_path / "data.jsonl").write_text("\n".join([line(q="x", a="y")] * 299 + ["{broken"]))
    data = read(tmp_path / "data.jsonl")
    assert len(prepared(data).splits["train"]) == 299
    with pytest.raises(DataError, match=r"data\.jsonl:300: not valid JSON"):
        prompts_of(data, make_config(**ALL_TRAIN), encoder)


CELL = st.text('a1,"\né😀 \t', min_size=1, max_size=5).map("x{}".format)


def quoted(cell):
    return '"' + cell.replace('"', '""') + '"'


def as_line(row, bad, _):
    return bad if bad is not None else line(q=row[0], a=row[1]).encode()


def as_record(row, bad, separator):
    return bad.replace(b",", separator) if bad is not None else separator.join(quoted(cell).encode() for cell in row)


BAD_LINES = st.sampled_from(
    [b"{", b"nul", b"[]", b'{"q": "\xff", "a": ""}', b'{"q": "\\udc00", "a": ""}', b'{"q": 3, "a": "x"}', b"\x00",
     b'{"a": 1, "a": 2}', b'{"q": {"a": []}, "a": "x"}', b'{"q": "x", "a": true}', b'{"q": [1], "a": 3}']
)  # fmt: skip
BAD_RECORDS = st.sampled_from(
    [b"x", b"x,y,z", "öä".encode() + b"\xff,y", b"x,y\x00", b'"x" y",z,"w"', b'"a,b",c,d', b" "]
)
FORMATS = {
    "data.jsonl": (as_line, BAD_LINES, b"", b""),
    "data.csv": (as_record, BAD_RECORDS, b"q,a\n", b","),
    "data.tsv": (as_record, BAD_RECORDS, b"q\ta\n", b"\t"),
}


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_gives_exactly_its_good_rows_and_names_the_others(tmp_path, make_config, prepared, name, data):
    lay_out, bad_rows, head, separator = FORMATS[name]
    rows = data.draw(st.lists(st.tuples(CELL, CELL, st.none() | bad_rows, st.integers(0, 2)), min_size=1, max_size=24))
    is_bad = [bad is not None for *_, bad, _ in rows]
    content, lines = head, []
    for *row, bad, num_blank in rows:
        content += b"\n" * num_blank
        lines.append(1 + content.count(b"\n"))
        content += lay_out(row, bad, separator) + b"\n"
    (tmp_path / name).write_bytes(content)
    if sum(is_bad) * 2 > len(rows):
        assume(not any(bad is not None and bad.startswith(b'{"q"') for _, _, bad, _ in rows))  # readable
        with pytest.raises(DataError):
            prepared(tmp_path / name, **DROP)
        return
    made = prepared(tmp_path / name, **DROP)
    assert made.splits["train"].keys.tolist() == [key for key, bad in enumerate(is_bad) if not bad]
    expected = [(q, a) for q, a, bad, _ in rows if bad is None]
    assert texts_of(make_config(**ALL_TRAIN, **DROP), read(tmp_path / name)) == expected
    assert [entry.key for entry in made.ledger] == [key for key, bad in enumerate(is_bad) if bad]
    assert [entry.why.split(": ")[0] for entry in made.ledger] == [
        f"{name}:{number}" for number, bad in zip(lines, is_bad, strict=True) if bad
    ]


NUMBERS = st.integers(-(2**53), 2**53) | st.floats()
KINDS = {"text": st.text("a1 é", max_size=3), "a number": NUMBERS, "true or false": st.booleans()}


@given(data=st.data(), common=st.sampled_from(list(KINDS)))
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mixed_column_without_its_bad_rows_is_what_it_would_be_without_them(tmp_path, data, common):
    others = st.one_of(*(values for kind, values in KINDS.items() if kind != common)) | st.just([1]) | st.just({})
    good = data.draw(st.lists(KINDS[common] | st.none(), min_size=1, max_size=12))
    num_good = sum(value is not None for value in good)
    bad = data.draw(st.lists(others, max_size=max(0, num_good - 1)))
    order = data.draw(st.permutations([*((value, True) for value in good), *((value, False) for value in bad)]))
    for name, values in {"all": order, "good": [each for each in order if each[1]]}.items():
        (tmp_path / f"{name}.jsonl").write_text(jsonl(*({"q": value, "x": "x"} for value, _ in values)))
    made = usable(read(tmp_path / "all.jsonl"), ["q"], PreprocessingConfig(on_bad_row="drop"))
    expected = read(tmp_path / "good.jsonl")
    assert list(made.faults) == [row for row, (_, is_good) in enumerate(order) if not is_good]
    kept = made.table.take(made.usable_rows())["q"]
    assert cell_texts(kept) == cell_texts(expected.table["q"])
    assert kept.null_count == expected.table["q"].null_count
    if num_good:
        assert kept.type == expected.table["q"].type
    same = usable(made, ["q"], PreprocessingConfig(on_bad_row="drop"))
    assert same.table.equals(made.table) or any(isinstance(value, float) and math.isnan(value) for value in good)


def test_whole_numbers_that_a_column_of_fractions_cannot_hold_are_bad(tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(f'{{"q": {value}}}\n' for value in (0.5, 2**53 + 2, 1, -(2**54))))
    made = usable(read(tmp_path / "data.jsonl"), ["q"], PreprocessingConfig(on_bad_row="drop"))
    assert {row: problem.what for row, problem in made.faults.items()} == dict.fromkeys(
        (1, 3), "column `q` holds a whole number that is too large here"
    )
    assert made.table["q"].to_pylist() == [0.5, None, 1.0, None]
    assert np.array_equal(made.usable_rows(), [0, 2])
