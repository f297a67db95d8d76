"""How many rows fit: by a number, and by a cap in bytes."""

import pytest
from tests.infer.costs_by_hand import costs

from brim.infer.engines import FixedRoom, MemoryRoom


def test_a_number_is_halved_and_never_below_one():
    room = FixedRoom(6, prefill_tokens=100)
    assert (room.rows(10), room.rows(1000, cells=5), room.prefill_tokens) == (6, 6, 100)
    room.shrink(rows=4, columns=10)
    assert (room.rows(10), room.prefill_tokens) == (2, 50)
    room.shrink(rows=2, columns=10)
    room.shrink(rows=1, columns=10)
    assert room.rows(10) == 1


@pytest.mark.parametrize("cap_bytes", [1300, 1380, 1381, 1759, 1760, 1761, 10_000])
def test_as_many_rows_as_the_cap_allows(cap_bytes):
    found = MemoryRoom(costs(), cap_bytes=cap_bytes).rows(30)
    assert found == 1 or costs().peak_bytes(found, 30) <= cap_bytes
    assert costs().peak_bytes(found + 1, 30) > cap_bytes


def test_a_row_alone_is_always_tried():
    assert MemoryRoom(costs(), cap_bytes=10).rows(30) == 1


def test_no_more_rows_than_bring_something():
    assert MemoryRoom(costs(), cap_bytes=10**9, most_rows=7).rows(30) == 7


def test_beside_cells_that_are_there_fewer_rows_fit():
    """1000 + 2 × 300 + 130 a row: three, where without the cells five would."""
    room = MemoryRoom(costs(), cap_bytes=2000)
    assert (room.rows(30), room.rows(30, cells=300)) == (5, 3)


def test_after_a_lack_of_memory_rows_add_less():
    room = MemoryRoom(costs(), cap_bytes=2000)
    room.shrink(rows=5, columns=30)  # 1950 bytes were predicted: the 950 that rows add become 665
    assert (room.cap_bytes, room.rows(30), room.prefill_tokens) == (1665, 3, 20)
    room.shrink(rows=100, columns=30)  # more rows than the cap allows were never run
    assert room.cap_bytes == 1000 + int(0.7 * 665)
