"""Exact nearest neighbours, against sorting everything."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.data.letter_encoder import LetterEncoder
from tests.properties import examples

from brim.data import nearest_examples
from brim.data.examples import NONE
from brim.data.nearest_examples import NearestExamples, nearest


def vectors(num_rows, seed, *, dimensions=5, distinct=None):
    made = np.random.default_rng(seed).normal(size=(num_rows, dimensions))
    made = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    return made if distinct is None else made[np.arange(num_rows) % distinct]


def by_sorting(queries, embeddings, own, num_examples):
    likeness = queries.astype(np.float64) @ embeddings.astype(np.float64).T
    likeness = np.round(likeness, 12)  # equal vectors have equal products, whatever the order of the sum
    rows = []
    for row, mine in zip(likeness, own, strict=True):
        order = np.lexsort((np.arange(len(row)), -row)).tolist()
        rows.append([position for position in order if position != mine][:num_examples])
    return rows


@examples(60)
@given(st.integers(2, 70), st.integers(1, 20), st.integers(0, 10**6), st.sampled_from([None, 40]), st.data())
def test_the_nearest_are_those_of_sorting_everything(num_pooled, num_queries, seed, distinct, data):
    embeddings, queries = vectors(num_pooled, seed, distinct=distinct), vectors(num_queries, seed + 1)
    own = np.array(data.draw(st.lists(st.integers(NONE, num_pooled - 1), min_size=num_queries, max_size=num_queries)))
    num_examples = data.draw(st.integers(1, num_pooled - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest_examples, "_BLOCK_EXAMPLES", data.draw(st.sampled_from([1, 7, 4096])))
        found = nearest(queries, embeddings, own, num_examples)
    assert found.tolist() == by_sorting(queries, embeddings, own, num_examples)
    for row, mine in zip(found.tolist(), own.tolist(), strict=True):
        assert len(set(row)) == num_examples
        assert mine not in row


def test_rows_are_found_alike_alone_and_together():
    embeddings, queries = vectors(9000, 1, dimensions=32), vectors(40, 2, dimensions=32)
    own = np.full(40, NONE)
    together = nearest(queries, embeddings, own, 4).tolist()
    assert [nearest(queries[[row]], embeddings, own[[row]], 4).tolist()[0] for row in range(40)] == together


def test_an_input_of_the_pool_is_not_embedded_again():
    encoder = LetterEncoder()
    pool = ["aab", "abb", "xyz", "aaa"]
    examples = NearestExamples(embeddings=encoder.encode(pool), encoder=encoder, num_examples=2)
    encoder.asked.clear()
    chosen = examples.choose(["aab", "xya"], np.array([0, NONE]))
    assert chosen.tolist() == [[3, 1], [2, 0]]
    assert encoder.asked == ["xya"]
