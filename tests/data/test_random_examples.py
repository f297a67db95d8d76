"""Rows drawn by chance, each row for itself."""

from collections import Counter

import numpy as np
from hypothesis import given, strategies as st

from brim.data.examples import NONE, RandomExamples, drawn


@given(st.integers(1, 60), st.data(), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_examples_are_different_and_never_the_rows_own(num_pooled, data, seed, key):
    own = data.draw(st.integers(NONE, num_pooled - 1))
    num_others = num_pooled - (own != NONE)
    num_examples = data.draw(st.integers(0, num_others))
    examples = RandomExamples(num_pooled=num_pooled, num_examples=num_examples, seed=seed)
    (chosen,) = examples.choose([str(key)], np.array([own])).tolist()
    assert len(set(chosen)) == num_examples
    assert own not in chosen
    assert set(chosen) <= set(range(num_pooled))


@given(st.permutations(range(12)), st.lists(st.integers(1, 11), max_size=3))
def test_a_rows_examples_depend_on_its_input_alone(order, cuts):
    examples = RandomExamples(num_pooled=50, num_examples=3, seed=7)
    own = np.arange(12) % 5 - 1

    def of(rows):
        return examples.choose([f"row {row}" for row in rows], own[rows]).tolist()

    together = dict(zip(range(12), of(list(range(12))), strict=True))
    for part in np.split(np.array(order), sorted(cuts)):
        assert of(part.tolist()) == [together[row] for row in part.tolist()]


def test_the_draw_is_kept_forever():
    assert [drawn(1000, 4, 42, key, 4) for key in (0, 1, 2**33)] == [
        [593, 860, 479, 950],
        [845, 111, 432, 878],
        [414, 447, 267, 377],
    ]
    assert drawn(3, 3, 1) != drawn(3, 3, 2)


def test_every_ordered_choice_is_as_likely():
    counts = Counter(tuple(drawn(4, 2, 1, key)) for key in range(12_000))
    assert len(counts) == 12
    assert all(abs(count - 1000) < 4 * (1000 * 11 / 12) ** 0.5 for count in counts.values())
