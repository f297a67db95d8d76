"""How many bytes a run may take, and why."""

import pytest

from brim.errors import ConfigError
from brim.memory.budget import Limit, Margin, Room, cpu_margin, cuda_margin, decide

GIB, MIB = 2**30, 2**20


def room(*, limits=((16 * GIB, "T4 has 16.0 GiB"),), outside=GIB, margin=None):
    return Room(
        device="t4",
        title="T4",
        memory_bytes=16 * GIB,
        limits=tuple(Limit(num_bytes=num_bytes, reason=reason) for num_bytes, reason in limits),
        outside_bytes=outside,
        margin=margin or Margin(share=0.1, num_bytes=7, reason="tests are careful"),
    )


def test_by_itself_the_least_limit_counts_with_its_reason():
    budget = decide(room(limits=((16 * GIB, "all"), (11 * GIB, "RLIMIT_AS"), (12 * GIB, "the container"))))
    assert (budget.limit_bytes, budget.limit_reason) == (11 * GIB, "RLIMIT_AS")
    assert (budget.margin_bytes, budget.margin_reason) == (GIB + 7, "tests are careful")
    assert budget.reserved_bytes == 9 * GIB - 7


@pytest.mark.parametrize(
    ("asked", "num_bytes"), [("14 GiB", 14 * GIB), (0.5, 8 * GIB), ("3000 MiB", 3000 * MIB), (1.0, 16 * GIB)]
)
def test_what_is_asked_for_is_taken(asked, num_bytes):
    budget = decide(room(), budget=asked)
    assert (budget.limit_bytes, budget.limit_reason) == (num_bytes, "memory.budget")


@pytest.mark.parametrize(("asked", "num_bytes"), [("1 GiB", GIB), (0.25, 4 * GIB), (0.0, 0)])
def test_a_margin_is_bytes_or_a_share_of_the_budget(asked, num_bytes):
    budget = decide(room(), margin=asked)
    assert (budget.margin_bytes, budget.margin_reason) == (num_bytes, "memory.margin")


def test_a_budget_above_the_device_is_refused():
    with pytest.raises(ConfigError, match=r"memory.budget is 20.0 GiB, and T4 has 16.0 GiB\n.*fix: set memory.budget"):
        decide(room(), budget="20 GiB")


def test_a_budget_above_what_is_free_is_cut_and_says_so():
    budget = decide(room(limits=((16 * GIB, "all"), (4 * GIB, "free memory"))), budget="14 GiB")
    assert budget.limit_bytes == 4 * GIB
    assert budget.limit_reason == "free memory; memory.budget says 14.0 GiB, and so much is not there"


@pytest.mark.parametrize(
    ("asked", "fix"), [({"budget": "1 GiB"}, "larger memory.budget"), ({"margin": "15 GiB"}, "free memory")]
)
def test_a_budget_of_which_nothing_is_left_is_refused(asked, fix):
    with pytest.raises(ConfigError, match=rf"nothing is left for the model(.|\n)*{fix}"):
        decide(room(), **asked)


def test_margins_say_their_cause():
    assert cpu_margin(returns_at_once=True) == Margin(share=0.01, num_bytes=0, reason="a prediction can be off by 1%")
    assert cpu_margin(returns_at_once=False).share == 0.15
    assert cuda_margin().num_bytes == 480 * MIB
    assert cuda_margin(outside_spread_bytes=MIB).reason.endswith("by 1.0 MiB")


@pytest.mark.parametrize(
    ("outside", "asked", "message"),
    [
        (
            2 * GIB,
            {"budget": "1 GiB"},
            "memory.budget: of 1.0 GiB (memory.budget), 2.0 GiB lie outside PyTorch: nothing is left for the model\n"
            "  expected: more than 2.0 GiB\n  fix: set a larger memory.budget",
        ),
        (
            GIB,
            {"budget": "3 GiB", "margin": "2 GiB"},
            "memory.budget: of 3.0 GiB (memory.budget), 1.0 GiB lie outside PyTorch and 2.0 GiB are kept free: nothing "
            "is left for the model\n  expected: more than 3.0 GiB\n"
            "  fix: set a larger memory.budget, or a smaller memory.margin",
        ),
        (
            GIB,
            {"margin": "15 GiB"},
            "of 16.0 GiB (T4 has 16.0 GiB), 1.0 GiB lie outside PyTorch and 15.0 GiB are kept free: nothing is left for "
            "the model\n  expected: more than 16.0 GiB\n"
            "  fix: free memory there, or raise this limit, or set a smaller memory.margin",
        ),
    ],
    ids=["no margin to lower", "a margin", "a margin alone"],
)
def test_a_smaller_margin_is_advised_only_where_one_would_help(outside, asked, message):
    plain = Margin(share=0.1, num_bytes=0, reason="a prediction can be off by 10%")
    with pytest.raises(ConfigError) as caught:
        decide(room(outside=outside, margin=plain), **asked)
    assert str(caught.value) == message
