"""Batch arithmetic, by example and by an oracle."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from brim.config import accumulates, default_rows, is_sized_by_memory
from brim.config.batch_rules import ACCUMULATION, BATCH, BatchSizes, batch_sizes, fixes_the_cut
from brim.config.findings import Finding
from brim.config.schema import FinetuneTrainer


def _trainer(**keys):
    return FinetuneTrainer.model_validate({"type": "finetune", **keys})


@pytest.mark.parametrize(
    ("batch", "accumulation", "effective", "processes", "sizes"),
    [
        (None, "auto", "auto", 1, (None, None, 16)),
        (None, "auto", "auto", 3, (None, None, 15)),
        (None, "auto", "auto", 4, (None, None, 16)),
        (None, "auto", "auto", 16, (1, 1, 16)),
        (None, "auto", "auto", 20, (1, 1, 20)),
        ("auto", "auto", "auto", 1, (None, None, 16)),
        (1, "auto", 32, 1, (1, 32, 32)),
        (4, "auto", 32, 1, (4, 8, 32)),
        (4, "auto", 32, 2, (4, 4, 32)),
        (2, 16, "auto", 1, (2, 16, 32)),
        (2, 16, "auto", 3, (2, 16, 96)),
        (None, 16, "auto", 1, (1, 16, 16)),
        (None, 16, 32, 1, (2, 16, 32)),
        (None, 16, 32, 2, (1, 16, 32)),
        (None, "auto", 32, 1, (None, None, 32)),
        (None, "auto", 32, 2, (None, None, 32)),
        (None, "auto", 1, 1, (1, 1, 1)),
        (None, "auto", 4, 4, (1, 1, 4)),
        ("auto", "auto", 32, 1, (None, None, 32)),
        ("auto", 16, 32, 1, (2, 16, 32)),
        (8, "auto", "auto", 1, (8, 1, 8)),
        (2, 8, 32, 2, (2, 8, 32)),
    ],
)
def test_two_sizes_give_the_third(batch, accumulation, effective, processes, sizes):
    keys = {"gradient_accumulation_steps": accumulation, "effective_batch_size": effective}
    keys |= {} if batch is None else {"batch_size": batch}
    found = batch_sizes(_trainer(**keys), num_processes=processes)
    assert isinstance(found, BatchSizes)
    assert (found.micro_batch_rows, found.accumulation_steps, found.effective_rows) == sizes


@pytest.mark.parametrize(
    ("keys", "processes", "what", "fix"),
    [
        (
            {"batch_size": 3, "effective_batch_size": 32},
            2,
            "trainer.effective_batch_size 32 is no multiple of batch_size 3 × 2 processes = 6",
            "set trainer.effective_batch_size: 30 or 36",
        ),
        (
            {"effective_batch_size": 3},
            8,
            "trainer.effective_batch_size 3 is no multiple of 8 processes",
            "set trainer.effective_batch_size: 8",
        ),
        (
            {"batch_size": 2, "gradient_accumulation_steps": 8, "effective_batch_size": 32},
            1,
            "trainer.effective_batch_size 32 is not batch_size 2 × gradient_accumulation_steps 8 = 16",
            "set trainer.effective_batch_size: 16, or leave one of the other two out",
        ),
        (
            {"batch_size": 8, "max_batch_size": 8},
            2,
            "the effective batch of 16 rows is above trainer.max_batch_size 8",
            "set trainer.max_batch_size: 16, or a smaller effective batch",
        ),
    ],
)
def test_what_does_not_multiply_up(keys, processes, what, fix):
    found = batch_sizes(_trainer(**keys), num_processes=processes)
    assert isinstance(found, Finding)
    assert (found.what, found.fix) == (what, fix)


_SIZE = st.integers(1, 12)


@given(st.none() | _SIZE, st.just("auto") | _SIZE, st.just("auto") | st.integers(1, 60), st.integers(1, 4))
def test_the_product_is_exact_and_what_was_given_is_kept(batch, accumulation, effective, processes):
    keys = {"gradient_accumulation_steps": accumulation, "effective_batch_size": effective}
    keys |= {} if batch is None else {"batch_size": batch}
    found = batch_sizes(_trainer(**keys), num_processes=processes)
    possible = any(
        b * a * processes == e
        for b in ([batch] if batch else range(1, 61))
        for a in ([accumulation] if accumulation != "auto" else range(1, 61))
        for e in ([effective] if effective != "auto" else [b * a * processes])
    )
    assert isinstance(found, BatchSizes) == possible
    if isinstance(found, BatchSizes) and found.micro_batch_rows is None:
        assert (batch, accumulation) == (None, "auto")
        assert found.effective_rows > processes
        assert found.effective_rows % processes == 0
        assert effective == found.effective_rows or (
            effective == "auto" and 16 - processes < found.effective_rows <= 16
        )
    elif isinstance(found, BatchSizes):
        assert found.micro_batch_rows * found.accumulation_steps * processes == found.effective_rows
        assert batch in (None, found.micro_batch_rows)
        assert accumulation in ("auto", found.accumulation_steps)
        assert effective in ("auto", found.effective_rows)


@pytest.mark.parametrize(
    ("keys", "several", "fixed"),
    [
        ({}, True, None),
        ({"max_batch_size": 1}, False, None),
        ({"effective_batch_size": 1}, False, None),
        ({"effective_batch_size": 8}, True, None),
        ({"effective_batch_size": 8, "batch_size": 8}, False, BATCH),
        ({"effective_batch_size": 8, "batch_size": 4}, True, BATCH),
        ({"batch_size": 4}, False, BATCH),
        ({"gradient_accumulation_steps": 1}, False, ACCUMULATION),
        ({"gradient_accumulation_steps": 2}, True, ACCUMULATION),
        ({"gradient_accumulation_steps": 2, "effective_batch_size": 8}, True, ACCUMULATION),
        ({"gradient_accumulation_steps": 2, "batch_size": 8}, True, BATCH),
    ],
)
def test_what_the_given_sizes_tell(keys, several, fixed):
    trainer = _trainer(**keys)
    assert accumulates(trainer) == several
    assert fixes_the_cut(trainer) == fixed


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({}, 16),
        ({"batch_size": "auto"}, 16),
        ({"max_batch_size": 8}, 8),
        ({"max_batch_size": 2**40}, 16),
        ({"batch_size": 1}, None),
        ({"gradient_accumulation_steps": 4}, None),
        ({"effective_batch_size": 32}, None),
        ({"batch_schedule": "0sp:4 8sp:8"}, None),
        ({"use_maximum_batch_size": True}, None),
    ],
)
def test_the_default_holds_where_no_key_says_how_many_rows_make_an_update(keys, rows):
    assert default_rows(_trainer(**keys)) == rows
    is_left_to_memory = keys == {"use_maximum_batch_size": True}
    assert is_sized_by_memory(_trainer(**keys)) == is_left_to_memory
    assert is_sized_by_memory(_trainer(**keys | {"use_maximum_batch_size": True})) == (
        rows is not None or is_left_to_memory
    )


def test_where_the_memory_decides_the_arithmetic_leaves_it_open():
    found = batch_sizes(_trainer(use_maximum_batch_size=True, batch_rampup="0.1dur"), num_processes=1)
    assert found == BatchSizes(effective_rows=None, micro_batch_rows=None, accumulation_steps=None)
