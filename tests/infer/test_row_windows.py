"""Attention of a step in parts, against the same in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from brim.infer.engines.cache import attending_in_windows, row_windows

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_every_slot_is_in_one_window_that_holds_all_it_needs(starts):
    windows = row_windows(starts)
    assert [slot for window in windows for slot in range(len(starts))[window.slots]] == list(range(len(starts)))
    for window in windows:
        assert window.unneeded == min(starts[window.slots]) - min(starts)


def test_neighbours_share_a_window():
    starts = [5] * 8 + [9, 7] + [8] * 6 + [30]
    assert [window.unneeded for window in row_windows(starts)] == [0, 2, 25]


@pytest.mark.parametrize("heads", [2, 6])
def test_attention_in_parts_is_that_in_one(heads):
    starts = [0, 3, *range(2, 19), 20]
    torch.manual_seed(0)
    arguments = _arguments(starts, end=25, heads=heads)
    module: Any = SimpleNamespace(num_key_value_groups=heads // 2, is_causal=True)
    whole, _ = sdpa_attention_forward(module, **arguments, scaling=0.5)
    seen = _shapes_seen(module, arguments, starts)
    torch.testing.assert_close(seen["attended"], whole)
    assert seen["in_parts"]


def test_transformers_own_attention_is_back_afterwards():
    with attending_in_windows(list(range(20)), CPU):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with pytest.raises(RuntimeError, match="out of"), attending_in_windows(list(range(20)), CPU):
        raise RuntimeError("out of memory")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


@pytest.mark.parametrize(("num_rows", "device"), [(8, "cpu"), (20, "cuda")])
def test_few_rows_and_gpus_attend_as_ever(num_rows, device):
    with attending_in_windows(list(range(num_rows)), torch.device(device)):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_what_is_no_step_of_these_rows_is_attended_to_in_one():
    torch.manual_seed(0)
    starts = list(range(20))
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    for arguments in (_arguments(starts[:19], end=25, heads=2), _arguments(starts, end=25, heads=2, queries=3)):
        whole, _ = sdpa_attention_forward(module, **arguments)
        with attending_in_windows(starts, CPU):
            assert torch.equal(ALL_ATTENTION_FUNCTIONS["sdpa"](module, **arguments)[0], whole)


def _arguments(starts: list[int], *, end: int, heads: int, queries: int = 1) -> dict[str, torch.Tensor]:
    num_rows, window, size = len(starts), end - min(starts), 4
    columns = torch.arange(min(starts), end)
    return {
        "query": torch.randn(num_rows, heads, queries, size),
        "key": torch.randn(num_rows, 2, window, size),
        "value": torch.randn(num_rows, 2, window, size),
        "attention_mask": (columns >= torch.tensor(starts)[:, None])[:, None, None, :].expand(-1, -1, queries, -1),
    }


def _shapes_seen(module: Any, arguments: dict[str, torch.Tensor], starts: list[int]) -> dict[str, Any]:
    """What a step attends, with NaN where no row may look."""
    values = arguments["value"].clone()
    for first in range(0, len(starts), 8):
        values[first : first + 8, :, : min(starts[first : first + 8]) - min(starts)] = torch.nan
    with attending_in_windows(starts, CPU):
        attended, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, **{**arguments, "value": values}, scaling=0.5)
    return {"attended": attended, "in_parts": bool(values.isnan().any())}
