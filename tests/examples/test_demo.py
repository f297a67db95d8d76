"""The demo's comparison of two models."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from demo import compare, table


def row_figures(*, loss_a_token: float, spread: float) -> pd.DataFrame:
    """200 rows of 10 to 29 tokens; every second token right; rows differ by `spread` in loss a token."""
    num_supervised = 10 + np.arange(200) % 20
    hard = np.where(np.arange(200) % 7 < 3, spread, -spread)
    return pd.DataFrame(
        {
            "row": np.arange(200),
            "loss": (loss_a_token + hard) * num_supervised,
            "num_correct": num_supervised // 2,
            "num_supervised": num_supervised,
        }
    )


def test_figures_are_means_over_tokens() -> None:
    base, tuned = row_figures(loss_a_token=3.0, spread=0.0), row_figures(loss_a_token=2.5, spread=0.0)
    loss, accuracy = compare(base, tuned)
    assert (loss.base, loss.tuned, loss.difference) == pytest.approx((3.0, 2.5, -0.5))
    halves = (base["num_supervised"] // 2).sum() / base["num_supervised"].sum()
    assert (accuracy.base, accuracy.difference) == pytest.approx((halves, 0.0))


def test_the_difference_is_paired() -> None:
    base, tuned = row_figures(loss_a_token=3.0, spread=1.0), row_figures(loss_a_token=2.9, spread=1.0)
    loss, _ = compare(base, tuned)
    assert loss.base_interval.low < loss.tuned < loss.base_interval.high
    assert (loss.difference_interval.low, loss.difference_interval.high) == pytest.approx((-0.1, -0.1))


def test_figures_of_different_rows_are_not_compared() -> None:
    base = row_figures(loss_a_token=3.0, spread=1.0)
    with pytest.raises(AssertionError):
        compare(base, base.assign(row=base["row"] + 1))


def test_the_table_names_every_metric() -> None:
    figures = compare(row_figures(loss_a_token=3.0, spread=0.0), row_figures(loss_a_token=2.5, spread=0.0))
    lines = table(figures).splitlines()
    assert [line[:14].strip() for line in lines[1:4]] == ["loss", "perplexity", "token accuracy"]
    assert lines[1].endswith("-0.5000 (-0.500 to -0.500)")
    assert "20.09" in lines[2]
