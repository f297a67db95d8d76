"""Responses and scores come back from bytes as they were."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.infer import prompt_hash, response_bytes, response_of, score_bytes, score_of
from brim.infer.engines import Response


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1)),
    end_id=st.none() | st.integers(0, 2**31 - 1),
    finish_reason=st.sampled_from(["stop", "length"]),
)
def test_a_response_comes_back(token_ids, end_id, finish_reason):
    response = Response(token_ids=token_ids, finish_reason=finish_reason, end_id=end_id)
    assert response_of(response_bytes(response)) == response


@pytest.mark.parametrize("score", [0.0, -1.2345678901234567, -1e300, float("-inf")])
def test_a_score_comes_back(score):
    assert score_of(score_bytes(score)) == score


def test_a_prompt_is_known_by_its_tokens_and_not_by_their_type():
    assert prompt_hash([1, 2, 3]) == prompt_hash(np.array([1, 2, 3], dtype=np.int32))
    assert len({prompt_hash(tokens) for tokens in ([], [0], [0, 0], [1, 2], [2, 1], [258])}) == 6
