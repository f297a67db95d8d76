"""When free slots are filled, and which prompts are read together."""

import pytest
from hypothesis import given, strategies as st

from brim.infer.engines import prefill_groups
from brim.infer.engines.continuous import rows_to_wait_for


@pytest.mark.parametrize(
    ("rows", "response_tokens", "expected"),
    [(64, 128, 8), (64, 32, 16), (64, 2, 32), (8, 200, 1), (1, 10, 1), (3, 1, 1), (1000, 5000, 20)],
)
def test_the_number_is_the_square_root_rule_within_one_and_half_of_the_rows(rows, response_tokens, expected):
    assert rows_to_wait_for(rows, response_tokens) == expected


@given(rows=st.integers(2, 300), response_tokens=st.integers(2, 500))
def test_no_other_number_costs_less(rows, response_tokens):
    def cost(k):
        return rows / (k * response_tokens) + k / (2 * rows)

    chosen = rows_to_wait_for(rows, response_tokens)
    least = min(cost(k) for k in range(1, rows // 2 + 1))
    assert cost(chosen) <= least * 1.25  # whole numbers, of which there may be few


def test_neighbours_share_a_pass_up_to_the_tokens():
    assert prefill_groups([9, 5, 5, 4, 1], most_tokens=10) == [range(1), range(1, 3), range(3, 5)]


@given(lengths=st.lists(st.integers(1, 50), max_size=40), most_tokens=st.integers(1, 200))
def test_groups_take_every_row_once_and_keep_to_the_tokens(lengths, most_tokens):
    groups = prefill_groups(lengths, most_tokens=most_tokens)
    assert [position for group in groups for position in group] == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[position] for position in group)
        assert len(group) == 1 or len(group) * longest <= most_tokens
