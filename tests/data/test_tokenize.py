"""Rows are cut where a length is set, and every cut is told."""

import numpy as np
from hypothesis import given, strategies as st

from brim.data.tokens import Limit, Limits
from brim.data.tokens.tokenization import cut

EOS = 1


def limit(num_tokens):
    return None if num_tokens is None else Limit(num_tokens=num_tokens, why="a limit")


def made(prompt, answer, /, **limits):
    row, cuts = cut(prompt, answer, eos_id=EOS, limits=Limits(**{name: limit(n) for name, n in limits.items()}))
    return row.input_ids.tolist(), row.supervised.tolist(), [(each.event, each.tokens_before) for each in cuts]


def test_prompt_answer_and_end_are_joined():
    assert made([5, 6], [7]) == ([5, 6, 7, EOS], [False, False, True, True], [])


def test_the_first_tokens_are_kept():
    assert made([5, 6], [7, 8], prompt=1) == ([5, 7, 8, EOS], [False, True, True, True], [("cut_prompt", 2)])
    assert made([5, 6], [7, 8], answer=1) == ([5, 6, 7, EOS], [False, False, True, True], [("cut_answer", 2)])
    assert made([5, 6], [7, 8], joined=4) == ([5, 6, 7, 8], [False, False, True, True], [("cut_joined", 5)])
    assert made([5, 6], [7, 8], joined=2) == ([5, 6], [False, False], [("cut_joined", 5)])


def test_a_length_that_fits_cuts_nothing():
    assert made([5, 6], [7, 8], prompt=2, answer=2, joined=5) == ([5, 6, 7, 8, EOS], [False] * 2 + [True] * 3, [])


def test_cuts_follow_each_other():
    ids, supervised, cuts = made([5, 6, 9], [7, 8], prompt=2, answer=1, joined=3)
    assert (ids, supervised) == ([5, 6, 7], [False, False, True])
    assert cuts == [("cut_prompt", 3), ("cut_answer", 2), ("cut_joined", 4)]


def test_a_prompt_alone_has_no_target_and_no_end():
    assert made([5, 6, 7], None, prompt=2) == ([5, 6], [False, False], [("cut_prompt", 3)])


def test_an_empty_prompt_leaves_the_first_token_untaught():
    row, _ = cut([], [7, 8], eos_id=EOS, limits=Limits())
    assert row.supervised.tolist() == [True, True, True]
    assert row.num_supervised == 2


lengths = st.none() | st.integers(1, 12)


@given(prompt=st.integers(0, 10), answer=st.integers(0, 10), of_prompt=lengths, of_answer=lengths, joined=lengths)
def test_no_limit_is_exceeded_and_the_kept_tokens_are_the_first(prompt, answer, of_prompt, of_answer, joined):
    ids, supervised, _ = made([5] * prompt, [7] * answer, prompt=of_prompt, answer=of_answer, joined=joined)
    kept_prompt = min(prompt, of_prompt or prompt)
    expected = [5] * kept_prompt + [7] * min(answer, of_answer or answer) + [EOS]
    assert ids == expected[: joined or len(expected)]
    assert supervised == (np.arange(len(ids)) >= kept_prompt).tolist()
