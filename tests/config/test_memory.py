"""The section `memory`: what is an amount, what is not, and what is advised."""

from __future__ import annotations

import pytest

from brim.config import load_config

BUDGET = "auto, a size with its unit such as 14 GiB, or a share of the device above 0 and up to 1 such as 0.9"
MARGIN = "auto, a size with its unit such as 500 MiB, or a share of the budget of at least 0 and below 1 such as 0.05"


@pytest.mark.parametrize("value", ["auto", "14 GiB", "14GiB", "500 MiB", 0.9, 1, 1.0, "1 B"])
def test_a_budget(minimal, value):
    assert load_config(minimal(memory={"budget": value})).config.memory.budget == value


@pytest.mark.parametrize("value", ["auto", "1.5 GiB", "0 B", 0, 0.05])
def test_a_margin(minimal, value):
    assert load_config(minimal(memory={"margin": value})).config.memory.margin == value


@pytest.mark.parametrize(
    ("value", "shown", "fix"),
    [
        (14, "14", "write the unit: 14 GiB or 14 MiB, or 0.14 for the share"),
        ("14", "'14'", "write the unit: 14 GiB or 14 MiB, or 0.14 for the share"),
        (1.5, "1.5", "write the unit: 1.5 GiB or 1.5 MiB"),
        (15_000_000_000, "15000000000", "write the unit: 15000000000 B"),
        ("90%", "'90%'", "write 0.9"),
        ("0.9", "'0.9'", "write 0.9 without quotes"),
        (-1, "-1", ""),
        ("-2 GiB", "'-2 GiB'", ""),
        (0, "0", "leave it out, or say how much the run may take"),
        ("0 GiB", "'0 GiB'", "leave it out, or say how much the run may take"),
        (10**30, str(10**30), ""),
        ("9" * 400 + " GiB", "'" + "9" * 59 + "…'", ""),
        ("2000000 TiB", "'2000000 TiB'", "no device has so much memory"),
        ("auot", "'auot'", "did you mean auto?"),
        ("much", "'much'", ""),
        (True, "true", ""),
        (None, "null", ""),
        ([], "an empty list", ""),
    ],
)
def test_what_is_no_budget(minimal, problems, value, shown, fix):
    message = f"memory.budget: memory.budget is {shown}\n  expected: {BUDGET}" + (f"\n  fix: {fix}" if fix else "")
    assert problems(minimal(memory={"budget": value})) == [message]


def test_a_margin_leaves_something(minimal, problems):
    assert problems(minimal(memory={"margin": 1})) == [
        f"memory.margin: memory.margin is 1\n  expected: {MARGIN}\n"
        "  fix: nothing would be left; set 0.05 to leave a twentieth free"
    ]
