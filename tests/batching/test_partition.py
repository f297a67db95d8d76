"""The two ways of dynamic programming."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import convex_surfaces, costs

from brim.batching.partition import Terms, cheapest_by_all_pairs, cheapest_by_queue, line_prices, price_table


def sizes(begins):
    end, found = len(begins) - 1, []
    while end:
        found.append((int(begins[end]), end))
        end = int(begins[end])
    return found[::-1]


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=150),
    costs=costs(peak=convex_surfaces()),
    share=st.floats(0, 1) | st.just(2.0),
    most_rows=st.none() | st.integers(1, 20),
    largest=st.booleans(),
)
def test_the_queue_finds_what_all_pairs_find(lengths, costs, share, most_rows, largest):
    lengths = np.sort(np.array(lengths))[::-1]
    alone, together = costs.peak_bytes(1, lengths[0]), costs.peak_bytes(len(lengths), lengths[0])
    terms = Terms(
        costs=costs, cap_bytes=int(np.ceil(alone + share * (together - alone))), most_rows=most_rows, largest=largest
    )
    weight = int(lengths.sum()) * len(lengths) + 1
    distinct, kinds = np.unique(lengths, return_inverse=True)
    widths = terms.widths(distinct, most=len(lengths))
    table = price_table(terms, distinct, widths, weight=weight)

    def price(bounds):
        return sum(table[kinds[begin], end - begin - 1] for begin, end in bounds)

    by_pairs = sizes(cheapest_by_all_pairs(table, kinds[None])[0])
    by_queue = sizes(cheapest_by_queue(widths[kinds].tolist(), line_prices(terms, lengths, weight=weight)))
    assert all(end - begin <= widths[kinds[begin]] for begin, end in by_queue)
    assert price(by_queue) == (price(by_pairs) if largest else pytest.approx(price(by_pairs), rel=1e-9))


@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=20), costs=costs())
def test_prices_without_arrays_are_those_of_the_table(lengths, costs):
    lengths = np.sort(np.array(lengths))[::-1]
    terms = Terms(costs=costs, cap_bytes=0)
    price = line_prices(terms, lengths, weight=1)
    for begin, length in enumerate(lengths):
        for rows in (1, 2, 7, 40, 300):
            assert price(begin, rows) == pytest.approx(float(costs.seconds(rows, length)), rel=1e-9, abs=1e-9)


def test_batches_do_not_touch_each_other():
    table = np.array([[1.0, 1.5, 9.0], [2.0, 5.0, 5.5]])
    kinds = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 0]])
    found = [sizes(begins) for begins in cheapest_by_all_pairs(table, kinds)]
    assert found == [[(0, 1), (1, 3)], [(0, 3)], [(0, 1), (1, 2), (2, 3)]]


def test_of_equal_cuts_the_one_with_the_largest_last_micro_batch():
    table = np.array([[1.0, 2.0, 3.0]])
    assert sizes(cheapest_by_all_pairs(table, np.zeros((1, 3), dtype=np.intp))[0]) == [(0, 3)]
    assert sizes(cheapest_by_queue([3, 3, 3], lambda _, rows: float(rows))) == [(0, 3)]
    assert sizes(cheapest_by_queue([2, 2, 2], lambda _, rows: float(rows))) == [(0, 1), (1, 3)]
