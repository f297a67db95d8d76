"""The padding benchmark's arithmetic, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.batching_padding import padded_over_real, paddings

from brim.batching import Costs, Surface


def _costs(*, launch_s: float) -> Costs:
    """One byte and one second a padded token, and `launch_s` a micro-batch."""
    peak = Surface(base=0.0, lengths=(1,), tokens=((1,),), values=((1.0,),))
    time = Surface(base=launch_s, lengths=(1,), tokens=((1,),), values=((launch_s + 1.0,),))
    return Costs(peak=peak, static_bytes=0, time=time)


def test_padded_over_real_counts_each_micro_batch_at_its_longest_row():
    steps = [[np.array([4, 1]), np.array([2, 2])], [np.array([3])]]
    assert padded_over_real(steps) == pytest.approx((8 + 4 + 3) / (5 + 4 + 3))


def test_rows_of_one_length_need_no_padding_but_a_fixed_cut_of_two_lengths_does():
    lengths = np.array([10, 100] * 16)  # one effective batch of 32 rows
    (found,) = paddings(lengths, _costs(launch_s=1.0), fixed_rows=(32,))
    assert found.cap_bytes == 3200
    assert found.fixed == pytest.approx(3200 / 1760, abs=1e-4)
    assert (found.brim, found.brim_micro_batches_per_step) == (1.0, 2.0)
    assert found.brim_largest == found.fixed  # all rows fit at once
    assert found.waste_over_fixed_waste == 0.0


def test_launches_that_cost_more_than_padding_leave_the_batch_whole():
    lengths = np.array([10, 100] * 16)
    (found,) = paddings(lengths, _costs(launch_s=10_000.0), fixed_rows=(32,))
    assert found.brim_micro_batches_per_step == 1.0
    assert found.waste_over_fixed_waste == 1.0
