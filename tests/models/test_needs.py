"""What a configuration needs of a machine, as far as that is known without torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import pytest

from brim.config import load_config
from brim.models import needs
from brim.models.needs import notes_on_this_machine, why_no_cuda


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A Linux machine with a driver, a torch for CUDA and these packages."""

    def make(*packages, driver=True, torch="2.13.0", platform="linux", visible=None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in packages else None)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: torch)
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(needs, "_DRIVERS", (tmp_path if driver else tmp_path / "none",))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def notes(*overrides, trainer="finetune"):
    source = {"base_model": "m", "trainer": {"type": trainer}, "adapter": "lora"}
    return notes_on_this_machine(load_config(source, overrides).config)


FLASH = "model_parameters.attn_implementation=flash_attention_2"
PAGED = "trainer.optimizer.type=paged_adamw"


def test_a_plain_configuration_needs_nothing(machine):
    machine(driver=False)
    assert notes() == notes("trainer.optimizer.type=adamw") == notes(trainer="none") == []


@pytest.mark.parametrize(
    ("override", "package", "instead"),
    [
        (FLASH, "flash_attn", "set model_parameters.attn_implementation: auto"),
        ("quantization.bits=4", "bitsandbytes", "install it, or leave quantization out"),
        ("trainer.optimizer.type=adamw_8bit", "bitsandbytes", "install it, or set trainer.optimizer.type: adamw"),
        ("trainer.optimizer.type=lion", "bitsandbytes", "install it, or set trainer.optimizer.type: adamw"),
        (PAGED, "bitsandbytes", "set trainer.optimizer.type: adamw"),
    ],
)
def test_a_package_that_is_not_installed(machine, override, package, instead):
    machine()
    (note,) = notes(override)
    assert f" needs the package {package}, which is not installed here (pip install " in note
    assert note.endswith(f"; `brim train` stops at it on this machine: {instead}")


def test_what_no_cuda_device_is_there_for(machine):
    for settings in (
        {"driver": False},
        {"torch": "2.13.0+cpu"},
        {"visible": ""},
        {"visible": "-1"},
        {"platform": "darwin"},
    ):
        machine("flash_attn", "bitsandbytes", "vllm", **settings)
        assert why_no_cuda()
        found = notes(FLASH, PAGED, "generation.engine=vllm")
        assert len(found) == 3
        assert all(f" needs a CUDA device, and there is none here: {why_no_cuda()}; " in note for note in found)
        assert notes("trainer.optimizer.type=adamw_8bit", "quantization.bits=8") == []
    assert found[1].startswith("trainer.optimizer.type: paged_adamw ")
    assert found[2].endswith("; `brim predict` stops at it on this machine: set generation.engine: auto")


@pytest.mark.parametrize("settings", [{}, {"visible": "0"}, {"platform": "win32", "driver": False}])
def test_where_it_cannot_be_told_it_says_so(machine, settings):
    machine("flash_attn", "bitsandbytes", **settings)
    assert why_no_cuda() == ""
    assert [note.split("; ")[1] for note in notes(FLASH, PAGED)] == [
        "a check loads no torch and cannot tell whether one is here"
    ] * 2
