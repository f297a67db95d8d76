"""Splits: exact counts, the same on every machine, and nothing lost."""

import random
import tracemalloc

import numpy as np
from hypothesis import given, strategies as st

from brim.data.read import spellings
from brim.data.usable.rows import (
    largest_remainder,
    sample,
    split_as_given,
    split_at_random,
    split_by_hash,
    split_stratified,
)

DEFAULT = (0.7, 0.1, 0.2)
probabilities = st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda shares: sum(shares) > 0.01)


def test_largest_remainder():
    for num_rows, shares, counts in [
        (10, DEFAULT, [7, 1, 2]),
        (3, DEFAULT, [2, 0, 1]),
        (100, (0.29, 0.57, 0.14), [29, 57, 14]),  # 0.29 * 100 is 28.999999999999996
        (2, (1 / 3, 1 / 3, 1 / 3), [1, 1, 0]),
    ]:
        assert largest_remainder(num_rows, shares) == counts


@given(num_rows=st.integers(0, 5000), shares=probabilities)
def test_each_count_is_within_one_of_its_share(num_rows, shares):
    counts = np.array(largest_remainder(num_rows, shares))
    assert counts.sum() == num_rows
    assert np.abs(counts - num_rows * np.array(shares) / sum(shares)).max() < 1 + 1e-6
    assert counts.min() >= 0


@given(num_rows=st.integers(0, 300), shares=probabilities, seed=st.integers(0, 2**32))
def test_a_random_split_has_exact_counts(num_rows, shares, seed):
    codes = split_at_random(num_rows, shares, seed=seed)
    assert np.bincount(codes, minlength=3).tolist() == largest_remainder(num_rows, shares)


def test_a_random_split_and_a_sample_depend_on_the_seed_alone():
    assert split_at_random(10, DEFAULT, seed=42).tolist() == [1, 0, 0, 0, 2, 0, 0, 2, 0, 0]
    assert split_at_random(10, DEFAULT, seed=43).tolist() != split_at_random(10, DEFAULT, seed=42).tolist()
    assert sample(10, 4, seed=42).tolist() == [0, 2, 3, 6]


def test_a_hash_split_is_the_same_on_every_machine_and_comes_near_its_shares():
    assert split_by_hash("abcdefghij", DEFAULT).tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 2, 0]
    counts = np.bincount(split_by_hash([f"row {number}" for number in range(10_000)], DEFAULT), minlength=3)
    assert np.abs(counts - [7000, 1000, 2000]).max() < 150  # more than three standard deviations
    assert set(split_by_hash([str(number) for number in range(500)], (0.5, 0.0, 0.5)).tolist()) == {0, 2}


@given(texts=st.lists(st.text(max_size=5), max_size=40), seed=st.integers(0, 100))
def test_a_hash_split_does_not_depend_on_order_or_company(texts, seed):
    of_text = dict(zip(texts, split_by_hash(texts, DEFAULT).tolist(), strict=True))
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    some = shuffled[: len(shuffled) // 2 + 1]
    assert split_by_hash(some, DEFAULT).tolist() == [of_text[text] for text in some]


@given(classes=st.lists(st.sampled_from(["a", "b", "", "ü"]), max_size=200), seed=st.integers(0, 1000))
def test_a_stratified_split_has_exact_counts_in_each_class(classes, seed):
    codes = split_stratified(classes, DEFAULT, seed=seed)
    for name in set(classes):
        of_class = codes[[number for number, each in enumerate(classes) if each == name]]
        assert np.bincount(of_class, minlength=3).tolist() == largest_remainder(len(of_class), DEFAULT)


def test_one_long_class_does_not_widen_the_others_and_trailing_zero_bytes_count():
    classes = ["x"] * 1000 + ["y" * 100_000]
    tracemalloc.start()
    codes = split_stratified(classes, DEFAULT, seed=0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20  # 400 MB, if every row were as wide as the longest
    assert np.bincount(codes, minlength=3).tolist() == [701, 100, 200]
    codes = split_stratified(["a", "a\0"] * 5, (0.5, 0.0, 0.5), seed=0)
    assert codes[::2].sum() == codes[1::2].sum() != 0


def test_a_given_split_knows_numbers_and_names_and_tells_what_it_does_not_know():
    codes, unknown = split_as_given(["0", "1", "2", "train", "Validation", "val", " test ", "1.0", "dev"])
    assert (codes.tolist(), unknown) == ([0, 1, 2, 0, 1, 1, 2, 1, 1], {})
    _, unknown = split_as_given(["0", "3", "tset", "3"])
    assert unknown == {"3": [1, 3], "tset": [2]}
    assert spellings(["0", "train", "1", "test", "0", "other"]) == {"train": ["0", "train"]}


@given(num_rows=st.integers(1, 200), seed=st.integers(0, 1000), data=st.data())
def test_a_sample_has_its_size_and_keeps_the_order(num_rows, seed, data):
    size = data.draw(st.integers(1, num_rows))
    rows = sample(num_rows, size, seed=seed).tolist()
    assert rows == sorted(set(rows) & set(range(num_rows)))
    assert len(rows) == size
