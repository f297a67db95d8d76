"""Table data: what columns teach and become, what is wrong with their cells, and the rows that are made of them."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.data.conftest import ids
from tests.messages import refused, says

from brim.config.schema import PreprocessingConfig
from brim.data.read import read
from brim.data.table import Feature, Scale, TableColumns, TableRows, prepare_table

N = 10
BINARY_OUTPUT = {"name": "y", "type": "binary", "is_output": True}


def features(*described):
    """Features by name and type, and what else differs from the defaults."""
    numbers = {"input_features": 0, "output_features": 0}
    found = []
    for each in described:
        group = "output_features" if each.pop("is_output", False) else "input_features"
        place, numbers[group] = f"{group}[{numbers[group]}]", numbers[group] + 1
        found.append(Feature(**{"column": each["name"], "place": place, **each}))
    return found


def prepared(data, *described, num_train=None, policy=None, encoder=None, **how):
    """Prepare rows of which the first are trained on, all but the last two without a number; returns all that is made."""
    num_rows = len(next(iter(data.values())))
    splits = ["train"] * (num_rows - 2 if num_train is None else num_train)
    data = {**data, "split": splits + ["validation"] * (num_rows - len(splits))}
    policy = PreprocessingConfig(**{"split": {"type": "fixed"}, **(policy or {})})
    return prepare_table(
        read(data), features(*(dict(each) for each in described)), encoder, policy=policy, seed=1, **how
    )


def batch_of(rows, **how):
    return rows.batch(pad_id=2, **{"is_packed": False, **how})


def column(done, name):
    (found,) = [each for each in (*done.columns.inputs, *done.columns.outputs) if each.name == name]
    return found


finite = st.floats(-1e30, 1e30)


@given(values=st.lists(finite, min_size=1, max_size=20), more=finite)
@pytest.mark.parametrize("normalization", [None, "zscore", "minmax", "iq", "log1p"])
def test_normalised_numbers_are_restored(normalization, values, more):
    numbers = np.array([*values, more])
    if normalization == "log1p":
        numbers = np.abs(numbers)
    scale = Scale.of(numbers[:-1], normalization)
    restored = scale.restored(scale.normalised(numbers))
    size = max(np.abs(numbers).max(), 1.0)
    np.testing.assert_allclose(restored, numbers, rtol=1e-9, atol=1e-9 * size)
    assert np.isfinite(scale.normalised(numbers)).all()


def test_each_normalization_is_what_its_name_says():
    values = np.array([1.0, 2.0, 3.0, 6.0, 8.0])
    for normalization, expected in {
        None: values,
        "zscore": (values - np.mean(values)) / np.std(values),
        "minmax": (values - 1) / 7,
        "iq": (values - 3) / 4,
        "log1p": np.log([2, 3, 4, 7, 9]),
    }.items():
        np.testing.assert_allclose(Scale.of(values, normalization).normalised(values), expected, rtol=1e-12)
        assert np.isfinite(Scale.of(np.full(3, 7.0), normalization).normalised(np.array([7.0, 8.0]))).all()


TABLE = {
    "n": [1.0, 2.0, 3.0, 6.0, 8.0, None, 4.0, 4.0, 100.0, -5.0],
    "c": ["b", "a", "b", "b", "a", " c ", "", "a", "z", "a"],
    "y": [True, False, True, True, None, False, True, False, True, True],
}
MIXED = [
    {"name": "n", "type": "number", "missing_value_strategy": "fill_with_mean"},
    {"name": "c", "type": "category", "most_common": 2, "missing_value_strategy": "fill_with_mode"},
    {"name": "h", "column": "c", "type": "category", "encoder": "onehot", "missing_value_strategy": "fill_with_const"},
    {"name": "y", "type": "binary", "is_output": True, "missing_value_strategy": "keep_row"},
    {"name": "z", "column": "n", "type": "number", "is_output": True, "missing_value_strategy": "keep_row"},
]  # fmt: skip


def test_columns_become_what_the_training_split_taught():
    done = prepared(TABLE, *MIXED)
    seen = np.array([1, 2, 3, 6, 8, 4, 4], dtype=float)
    batch = batch_of(done.splits["train"])
    expected = (np.array([1, 2, 3, 6, 8, seen.mean(), 4, 4]) - seen.mean()) / seen.std()
    np.testing.assert_allclose(batch.numbers[:, 0], expected, rtol=1e-6)
    assert column(done, "c").labels == ("a", "b")  # as often as one another: in the alphabet's order
    assert batch.categories[:, 0].tolist() == [2, 1, 2, 2, 1, 0, 1, 1]
    assert column(done, "h").labels == ("a", "b", "c")
    assert batch.numbers[:, 1:].argmax(dim=1).tolist() == [2, 1, 2, 2, 1, 3, 0, 1]
    assert (batch.numbers[:, 1:].sum(dim=1) == 1).all()
    assert batch.targets[:, 0].tolist() == [1, 0, 1, 1, 0, 0, 1, 0]
    assert batch.weights.tolist() == [[1, 1]] * 4 + [[0, 1], [1, 0], [1, 1], [1, 1]]
    output = column(done, "z").as_output()
    restored = output.scale.restored(batch.targets[:, 1].numpy())
    np.testing.assert_allclose(restored[[0, 4, 6]], [1, 8, 4], rtol=1e-6)
    assert (output.mean, output.deviation) == (pytest.approx(seen.mean()), pytest.approx(seen.std()))
    assert [entry.event for entry in done.ledger] == ["filled_missing", "filled_missing"]
    assert any(says(note, "column `c`: 2 rows have none of the 2 known labels") for note in done.notes)
    assert any(says(note, "column `y` has no value in 1 row") for note in done.notes)
    assert batch_of(done.splits["validation"]).categories[:, 0].tolist() == [0, 1]


def test_statistics_change_with_training_rows_alone():
    done, same = prepared(TABLE, *MIXED), prepared({**TABLE, "n": [*TABLE["n"][:8], 7e6, 0.0], "c": [*TABLE["c"][:8], "q", "q"]}, *MIXED)  # fmt: skip
    other = prepared({**TABLE, "n": [9.0, *TABLE["n"][1:]]}, *MIXED)
    assert done.columns == same.columns
    assert done.columns != other.columns


def test_outliers_are_replaced_or_their_rows_left_out():
    columns = {"n": [1.0, 2.0, 3.0, 2.0, 1000.0, 2.0, 2000.0], "y": [0, 1, 0, 1, 0, 1, 0]}
    number = {"name": "n", "type": "number", "outlier_threshold": 1.5}
    filled = prepared(columns, {**number, "outlier_strategy": "fill_with_mean"}, BINARY_OUTPUT)
    seen = np.array([1.0, 2.0, 3.0, 2.0])
    np.testing.assert_allclose(
        batch_of(filled.splits["train"]).numbers[:, 0], (np.array([1, 2, 3, 2, 2]) - 2) / seen.std()
    )
    assert [(entry.key, entry.event) for entry in filled.ledger] == [(4, "filled_outlier"), (6, "filled_outlier")]
    dropped = prepared(columns, {**number, "outlier_strategy": "drop_row"}, BINARY_OUTPUT)
    assert [entry.event for entry in dropped.ledger] == ["dropped_outlier"] * 2
    assert dropped.splits["train"].keys.tolist() == [0, 1, 2, 3]
    assert dropped.splits["validation"].keys.tolist() == [5]


def test_truth_values_are_words_or_the_columns_own():
    for values, labels, targets in [
        (["yes", "No", "y", "n"], ("false", "true"), [1, 0, 1, 0]),
        ([1.0, 0.0, 0.0, 1.0], ("false", "true"), [1, 0, 0, 1]),
        (["human", "bot", "bot", "human"], ("human", "bot"), [0, 1, 1, 0]),
    ]:
        done = prepared({"y": values}, BINARY_OUTPUT, num_train=4)
        assert column(done, "y").labels == labels
        assert batch_of(done.splits["train"]).targets[:, 0].tolist() == targets
    assert any(says(note, "column `y` holds no truth values: 'bot' counts as true") for note in done.notes)
    named = prepared({"y": values}, {**BINARY_OUTPUT, "fallback_true_label": "human"}, num_train=4)
    assert batch_of(named.splits["train"]).targets[:, 0].tolist() == [1, 0, 0, 1]
    assert not any("truth values" in note for note in named.notes)


def test_class_weights_are_in_the_divisor():
    done = prepared({"c": ["a", "b", "a", "b"]}, {"name": "c", "type": "category", "is_output": True, "class_weights": {"b": 3.0}}, num_train=4)  # fmt: skip
    assert done.splits["train"].weights[:, 0].tolist() == [1, 3, 1, 3]


NUMBER, CATEGORY = {"name": "n", "type": "number"}, {"name": "c", "type": "category", "is_output": True}
ALL = {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}}
BAD = [  # a cell, or the whole column, the feature, and what is said of the row
    ("n", "tall", NUMBER, "column `n` holds 'tall', which is not a number … a number such as 3"),
    ("n", "inf", NUMBER, "column `n` holds 'inf', an infinite number"),
    ("n", "1e39", NUMBER, "column `n` holds '1e39', a number beyond 32 bits"),
    ("n", "-2", {**NUMBER, "normalization": "log1p"}, "column `n` holds '-2', which has no log1p … above -1"),
    ("y", "perhaps", BINARY_OUTPUT, "column `y` holds 'perhaps', which is no truth value … yes or no"),
]


def many_rows(**columns):
    return {"n": ["1", "2.5", "3e0", " 4"] * N, "y": ["yes", "no"] * 2 * N, "c": ["a", "b"] * 2 * N, **columns}


@pytest.mark.parametrize(("name", "cell", "feature", "words"), BAD)
def test_a_bad_cell_is_its_rows_fault(name, cell, feature, words):
    columns = many_rows()
    columns[name][7] = cell
    used = [feature] if feature is BINARY_OUTPUT else [feature, BINARY_OUTPUT]
    with refused(f"the given columns, row 7: {words} … on_bad_row: drop"):
        prepared(columns, *used)
    done = prepared(columns, *used, policy={"on_bad_row": "drop"})
    assert [(entry.key, entry.event, entry.split) for entry in done.ledger] == [(7, "dropped_bad", "train")]
    assert 7 not in done.splits["train"].keys
    few = prepared(columns, *used, policy={"max_dropped_fraction": 0.03})
    assert few.num_spare == 0
    assert "max_dropped_fraction" in few.ledger.summary()[0]


def test_infinite_numbers_of_a_number_column():
    done = prepared({**many_rows(), "n": [1.0, math.inf, 2.0, -math.inf] + [1.0] * 36}, NUMBER, BINARY_OUTPUT, policy={"on_bad_row": "drop"})  # fmt: skip
    assert [entry.key for entry in done.ledger] == [1, 3]
    assert batch_of(done.splits["train"]).numbers.isfinite().all()


@pytest.mark.parametrize(
    ("columns", "feature", "words"),
    [
        ({"n": [None] * 40}, NUMBER, "the given columns: column `n` has no value in any row … remove input_features[0]"),
        ({"n": [None] * 38 + ["1", "2"]}, {**NUMBER, "missing_value_strategy": "fill_with_mean"}, "… no value in the training split"),
        ({"c": ["a"] * 40}, CATEGORY, "the given columns: column `c` holds 1 label … at least two"),
        ({"c": ["a"] * 38 + ["b"] * 2}, CATEGORY, "the given columns: column `c` holds 'a' alone in the training split"),
        ({"c": [f"label {number}" for number in range(40)]}, CATEGORY, "the given columns: column `c` holds 40 different values in 38 rows: too many"),
        ({"c": ["a", "A "] * 20}, CATEGORY, "the given columns: column `c` writes one label in 2 ways"),
        ({}, {**CATEGORY, "class_weights": {"d": 2.0}}, "output_features[0].loss.class_weights: the class weight of 'd' is of no label"),
        ({"n": np.array(["2024-01-31"] * 40, dtype="datetime64[D]")}, NUMBER, "the given columns: column `n`, which input_features[0] reads as a number, holds values of the type date32"),
        ({}, {**NUMBER, "name": "m"}, "the given columns: no column `m`, which input_features[0] names"),
        ({"n": [None, *range(39)]}, NUMBER, "the given columns, row 0: column `n` is empty in 1 row"),
    ],
)  # fmt: skip
def test_a_column_that_teaches_nothing_is_refused(columns, feature, words):
    used = [feature] if feature.get("is_output") else [feature, BINARY_OUTPUT]
    with refused(words):
        prepared(many_rows(**columns), *used)


def test_a_hundred_thousand_classes_are_learned_and_more_refused():
    labels = np.repeat(np.arange(100_001), 2)
    with refused("the given columns: column `c` holds 100,001 different values in 200,002 rows: too many for labels"):
        prepared({"c": labels}, CATEGORY, policy=ALL)
    done = prepared({"c": labels[2:]}, CATEGORY, policy=ALL)
    assert len(column(done, "c").labels) == 100_000


def test_what_a_run_learned_is_used_for_other_data(tmp_path):
    done = prepared(many_rows(), NUMBER, CATEGORY, BINARY_OUTPUT)
    done.columns.save(tmp_path / "inputs.json")
    kept = TableColumns.load(tmp_path / "inputs.json")
    assert kept == done.columns
    data = {"n": [7.0], "c": ["new"], "y": ["no"], "split": ["test"]}
    how = {"columns": kept, "only": "full"}
    with refused("the given columns, row 0: column `c` holds 'new', which is a label that was never seen … 'a', 'b'"):
        prepared(data, NUMBER, CATEGORY, BINARY_OUTPUT, **how)
    alone = prepared(data, NUMBER, CATEGORY, BINARY_OUTPUT, with_outputs=False, **how)
    batch = batch_of(alone.splits["full"])
    assert batch.numbers.tolist() == [[pytest.approx(column(done, "n").scale.normalised(np.array([7.0]))[0])]]
    assert batch.targets.shape == (1, 0)
    (tmp_path / "inputs.json").write_text("{}")
    with refused(f"{tmp_path / 'inputs.json'}: the statistics … train again"):
        TableColumns.load(tmp_path / "inputs.json")


TEXTS = [{"name": "t", "type": "text", "max_sequence_length": 5}, {"name": "u", "type": "text"}]


def test_texts_stand_beside_their_rows_through_order_disk_and_batches(encoder, tmp_path):
    columns = {"t": ["one", "", "four hundred", "two"], "u": ["a", "bcdefg", "h", "</s>"], **{k: v[:4] for k, v in many_rows().items()}}  # fmt: skip
    done = prepared(columns, *TEXTS, NUMBER, BINARY_OUTPUT, num_train=4, encoder=encoder)
    rows = done.splits["train"]
    assert [entry.event for entry in done.ledger] == ["cut_text"]
    assert any(says(note, "the text of 1 row spells out special tokens") for note in done.notes)
    assert rows.lengths.tolist() == [4, 7, 5, 4]
    assert rows.read_by(is_packed=True, needs_mask=False).lengths.tolist() == [6, 8, 7, 6]
    taken = rows.take([2, 0]).read_by(is_packed=False, needs_mask=True)
    batch = batch_of(taken)
    texts = ["four", "h", "one", "a"]
    assert [ids_[: at + 1].tolist() for ids_, at in zip(batch.input_ids, batch.last, strict=True)] == [[0, *ids(text)] for text in texts]  # fmt: skip
    assert batch.mask.sum(dim=1).tolist() == [5, 2, 4, 2]
    packed = batch_of(taken, is_packed=True)
    assert packed.packed.num_rows == 4
    assert packed.mask is None
    assert packed.input_ids[0, packed.last].tolist() == [0 + ids(text)[-1] for text in texts]
    taken.save(tmp_path)
    rows.save(tmp_path)
    same, whole = TableRows.mapped(tmp_path)
    assert len(list(tmp_path.glob("*.arrow"))) == 1
    assert whole.keys.tolist() == [0, 1, 2, 3]
    for name in ("input_ids", "mask", "last", "numbers", "categories", "targets", "weights"):
        assert getattr(batch_of(same), name).tolist() == getattr(batch, name).tolist()
    bare = rows.without_texts()
    assert bare.lengths.tolist() == [1] * 4
    assert batch_of(bare.take([3])).numbers.tolist() == batch_of(rows.take([3])).numbers.tolist()
    assert batch_of(bare).input_ids.shape[0] == 0


def test_texts_beyond_the_context_and_those_that_end_with_padding(encoder):
    columns = {"t": ["one"] * 40, "u": ["x" * 9, "end<pad>", *["y"] * 38], **many_rows()}
    used = [*TEXTS, NUMBER, BINARY_OUTPUT]
    with refused("the given columns, row 1: the text of column `u` ends with the padding token", "… row 0 (10 tokens): 1 of 40 rows are longer"):  # fmt: skip
        prepared(columns, *used, encoder=encoder, context_length=6)
    policy = {"on_bad_row": "drop", "on_overlong": "drop"}
    done = prepared(columns, *used, encoder=encoder, context_length=6, policy=policy)
    assert [entry.event for entry in done.ledger] == ["dropped_overlong", "dropped_bad"]
    assert done.splits["train"].keys[:2].tolist() == [2, 3]
    cut = prepared(columns, *used, encoder=encoder, context_length=6, policy={**policy, "on_overlong": "truncate"})
    assert cut.splits["train"].lengths.max() == 6


def test_a_row_without_any_output_teaches_nothing():
    output = {**BINARY_OUTPUT, "missing_value_strategy": "keep_row"}
    done = prepared({"n": [1, 2, 3, 4], "y": [True, None, False, True]}, NUMBER, output, num_train=4)
    assert [(entry.key, entry.event) for entry in done.ledger] == [(1, "dropped_missing")]
    assert len(done.splits["train"]) == 3


def test_a_text_among_python_numbers_is_its_rows_fault():
    columns = {**many_rows(), "n": [1.0, "tall"] + [2.0, 3.0] * 19}
    with refused("the given columns, row 1: column `n` changes its type: text here"):
        prepared(columns, NUMBER, BINARY_OUTPUT)
    done = prepared(columns, NUMBER, BINARY_OUTPUT, policy={"on_bad_row": "drop"})
    assert [(entry.key, entry.event) for entry in done.ledger] == [(1, "dropped_bad")]


def test_what_a_column_cannot_teach_is_noted():
    rare = {"name": "r", "type": "category", "most_common": 1, "missing_value_strategy": "fill_with_mode"}
    done = prepared({"r": ["a", "b", "c", None, "a"], "n": [7] * 5, "c": ["x", "y", "x", "x", "z"]}, rare, NUMBER, CATEGORY, num_train=4)  # fmt: skip
    assert batch_of(done.splits["train"]).categories[:, 0].tolist() == [1, 0, 0, 1]
    assert done.columns.outputs[0].labels == ("x", "y", "z")
    for words in (
        "column `c`: 1 label has no row in the training split, and cannot be learned: 'z'",
        "column `n` has one value in the training split",
        "column `r`: 2 rows have none of the 1 known label:",
    ):
        assert any(says(note, words) for note in done.notes), done.notes
