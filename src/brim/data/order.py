"""The order in which a run sees its rows: a pure function of the seed and of the samples consumed so far."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def rows_of_step(*, num_rows: int, seed: int, consumed_samples: int, size: int) -> tuple[int, npt.NDArray[np.int64]]:
    """The epoch and the rows (positions, in order) of the next effective batch.

    Each epoch is a permutation of all rows, drawn from (seed, epoch). A batch never crosses an epoch's end: the last
    one of an epoch may hold fewer than `size` rows.
    """
    assert num_rows > 0, "there is no order of no rows"
    assert size > 0, "a batch holds at least one row"
    epoch, start = divmod(consumed_samples, num_rows)
    return epoch, _epoch_order(num_rows, seed, epoch)[start : start + size]


def random_order(num_rows: int, *entropy: int) -> npt.NDArray[np.int64]:
    """A permutation drawn from these numbers; the same with every version of numpy.

    The raw stream of PCG64 and SeedSequence are promised never to change, numpy's own `permutation` is not.
    """
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows)
    return np.argsort(np.asarray(keys, dtype=np.uint64), kind="stable").astype(np.int64)


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    order = random_order(num_rows, seed, epoch)
    order.setflags(write=False)
    return order
