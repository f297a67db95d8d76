"""The longest prompt comes first, and a cache is as large as it will have to be."""

import numpy as np

from brim.data.tokens import TokenRow, TokenRows
from brim.infer.engines import FixedRoom
from brim.infer.engines.continuous import Queue


def prompts_of(lengths):
    return TokenRows.from_rows(
        TokenRow(key=i, input_ids=np.full(n, 5, np.int32), supervised=np.zeros(n, bool)) for i, n in enumerate(lengths)
    )


class Cells:
    """A Room of so many cells, where nothing but the cells takes memory."""

    prefill_tokens = 64

    def __init__(self, cells):
        self.cells = cells

    def rows(self, columns, *, cells=0):
        return max(1, self.cells // columns)

    def shrink(self, *, rows, columns):
        raise AssertionError("nobody ran out of memory")


def test_rows_come_by_length_and_each_once():
    queue = Queue(prompts_of([3, 9, 1, 9, 4]), max_new_tokens=5)
    assert [row.position for row in queue.take(3)] == [1, 3, 4]
    assert len(queue) == 2
    assert [row.position for row in queue.take(9)] == [0, 2]
    assert not queue


def test_rows_that_come_back_go_first_among_their_like_and_keep_their_tokens():
    queue = Queue(prompts_of([3, 9, 1, 9, 4]), max_new_tokens=5)
    first, second, third = queue.take(3)
    third.generated += [7, 8]
    queue.give_back([third, first])
    assert len(queue) == 4
    assert [row.position for row in queue.take(4)] == [1, 4, 0, 2]
    assert third.tokens == [5, 5, 5, 5, 7, 8]
    assert second.position == 3


def test_a_cache_has_columns_for_the_prompt_and_all_new_tokens_but_the_last():
    queue = Queue(prompts_of([3, 9]), max_new_tokens=5)
    assert queue.columns() == 13
    active = queue.take(1)
    assert queue.columns() == 7
    assert queue.columns(active) == 13


def test_the_memory_of_a_cache_is_what_its_fullest_layout_takes():
    queue = Queue(prompts_of([90, *[10] * 19]), max_new_tokens=11)
    # 100 columns of one row leave 50 of 150 cells idle; 20 columns of seven rows leave 10.
    assert queue.first_shape(Cells(150)) == (1, 100, 140)


def test_few_prompts_take_no_more_than_they_need():
    queue = Queue(prompts_of([9, 5, 5]), max_new_tokens=2)
    assert queue.first_shape(Cells(10_000)) == (3, 10, 30)
    assert queue.first_shape(FixedRoom(2, prefill_tokens=1)) == (2, 10, 20)


def test_responses_are_taken_to_be_long_until_some_have_ended():
    queue = Queue(prompts_of([2, 2]), max_new_tokens=10)
    assert queue.response_tokens == 10
    row = queue.take(1)[0]
    row.generated += [1, 2]
    queue.finish(row)
    assert queue.response_tokens == 6
