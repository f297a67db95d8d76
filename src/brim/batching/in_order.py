"""Groups of neighbours in an effective batch's own order, for measurements that ask for random groups of rows."""

from __future__ import annotations

from collections.abc import Callable


def groups_in_order(num_rows: int, *, num_groups: int, longest: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """The first row of each group and the first after it: every row once, in order, `num_groups` groups of equal size.

    num_groups: at least 1. All groups are of one row where there are no more rows than groups. longest: of the rows
    from a position, and of so many at most, how many fit together; at least 1. Where it is fewer than a group should
    have, there are more groups.
    """
    groups: list[tuple[int, int]] = []
    start = 0
    while start < num_rows:
        groups_left = max(1, num_groups - len(groups))
        wanted = -(-(num_rows - start) // groups_left)
        stop = start + longest(start, wanted)
        groups.append((start, stop))
        start = stop
    return groups
