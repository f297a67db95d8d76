"""The budget on the device at hand; CUDA's answers are made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from brim import Model
from brim.config.schema import MemoryConfig
from brim.memory import budget_of, cpu_device, enforce, find_device, limit_lifted

GIB, MIB = 2**30, 2**20
T4 = replace(find_device("t4"), memory_bytes=15 * GIB)


@pytest.fixture
def card(monkeypatch):
    """A card with 15 GiB, of which a context of 100 MiB and 2 GiB of PyTorch's are taken."""
    state = SimpleNamespace(total=15 * GIB, free=13 * GIB - 100 * MIB, reserved=2 * GIB, fraction=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (state.free, state.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: state.reserved)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=state.total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: setattr(state, "fraction", share))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: state.fraction)
    return state


def test_libraries_that_are_still_to_be_loaded_count(card):
    budget = budget_of(MemoryConfig(), T4, is_at_hand=True)
    assert (budget.limit_bytes, budget.outside_bytes) == (T4.memory_bytes, T4.outside_bytes)
    assert budget.margin_bytes == round(0.01 * (T4.memory_bytes - T4.outside_bytes)) + 480 * MIB


def test_what_other_processes_take_is_not_there(card):
    card.free -= 4 * GIB
    budget = budget_of(MemoryConfig(), T4, is_at_hand=True)
    assert budget.outside_bytes == 4 * GIB + 100 * MIB
    assert (
        "4.1 GiB are taken by the driver and by others" in budget_of(MemoryConfig(), T4, is_at_hand=True).limit_reason
    )


def test_a_budget_is_what_pytorch_may_reserve_and_what_is_outside(card):
    budget = budget_of(MemoryConfig(budget="10 GiB"), T4, is_at_hand=True)
    enforce(budget, T4)
    assert card.fraction == (10 * GIB - T4.outside_bytes) / (15 * GIB)


def test_the_limit_is_lifted_when_the_job_ends_or_fails(card):
    card.fraction = 0.9
    budget = budget_of(MemoryConfig(budget="10 GiB"), T4, is_at_hand=True)
    with pytest.raises(ZeroDivisionError), limit_lifted():
        with limit_lifted():
            enforce(budget, T4)
        assert card.fraction == (10 * GIB - T4.outside_bytes) / (15 * GIB)
        enforce(budget_of(MemoryConfig(budget="8 GiB"), T4, is_at_hand=True), T4)
        1 / 0  # noqa: B018
    assert card.fraction == 0.9


@pytest.mark.parametrize("method", ["train", "evaluate", "predict", "generate", "collect_activations"])
def test_every_job_of_a_model_lifts_the_limit(card, monkeypatch, method):
    card.fraction = 1.0
    budget = budget_of(MemoryConfig(budget="10 GiB"), T4, is_at_hand=True)

    def limited(*arguments, **keys):
        enforce(budget, T4)
        raise ZeroDivisionError

    monkeypatch.setattr(Model, "_open", limited)
    monkeypatch.setattr(Model, "_opened", limited)  # for a training
    monkeypatch.setattr("brim.model.check_run_folder", lambda *arguments, **keys: None)
    model = Model({"base_model": "none", "dataset": "none", "trainer": {"type": "finetune"}})
    with pytest.raises(ZeroDivisionError):
        getattr(model, method)(*{"generate": ["a"], "collect_activations": ["last"]}.get(method, []))
    assert card.fraction == 1.0


def test_a_device_that_is_not_at_hand_is_not_asked(monkeypatch):
    budget = budget_of(MemoryConfig(), T4, is_at_hand=False)
    assert (budget.limit_bytes, budget.outside_bytes) == (T4.memory_bytes, T4.outside_bytes)
    assert budget.limit_reason == "NVIDIA T4 has 15.0 GiB"


def test_a_cpu_has_what_is_there_beside_the_process():
    budget = budget_of(MemoryConfig(budget=1.0), cpu_device(), is_at_hand=True)
    assert 0 < budget.reserved_bytes < budget.limit_bytes <= cpu_device().memory_bytes
    assert budget.margin_bytes == pytest.approx(0.15 * (budget.limit_bytes - budget.outside_bytes), abs=1)
