"""By what the learning rate is multiplied at another batch than the final one."""

import pytest

from brim.train.optimizer import batch_factor


@pytest.mark.parametrize(
    ("scaling", "size", "expected"),
    [("none", 64, 1.0), ("sqrt", 64, 0.25), ("linear", 64, 0.0625), ("sqrt", 4096, 2.0), ("linear", 4096, 4.0)],
)
def test_the_factor_is_a_power_of_the_share_of_the_final_size(scaling, size, expected):
    assert batch_factor(scaling, size=size, final_size=1024) == expected


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear"])
def test_it_is_one_at_the_final_size(scaling):
    assert [batch_factor(scaling, size=size, final_size=size) for size in (1, 3, 1000)] == [1.0] * 3
