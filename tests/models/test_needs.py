"""What a configuration needs of its base model and of a machine, as far as that is known without torch."""

import importlib.metadata
import importlib.util
import json
import sys

import pytest
import torch
from tests.memory.tiny_architectures import FAMILIES, write_folder
from transformers import AutoConfig, AutoModelForCausalLM

from brim.config import load_config
from brim.errors import ConfigError, ModelError
from brim.models import needs, notes_on_this_machine, require_trainable
from brim.models.adapters import add_adapter
from brim.models.folders import locate
from brim.models.needs import why_no_cuda
from brim.notes import kind_of


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


def test_a_package_that_is_not_installed(machine):
    machine()
    for override, package, instead in [
        (FLASH, "flash_attn", "set model_parameters.attn_implementation: auto"),
        ("model_parameters.kernels=liger", "liger_kernel", "set model_parameters.kernels: auto"),
        ("quantization.bits=4", "bitsandbytes", "install it, or leave quantization out"),
        ("trainer.optimizer.type=adamw_8bit", "bitsandbytes", "install it, or set trainer.optimizer.type: adamw"),
        (PAGED, "bitsandbytes", "set trainer.optimizer.type: adamw"),
    ]:
        (note,) = notes(override)
        assert f" needs the package {package}, which is not installed here (pip install " in note
        assert note.endswith(f"; `brim train` stops at it on this machine: {instead}")
        assert kind_of(note) == "warning"


def test_what_no_cuda_device_is_there_for(machine):
    machine(driver=False)
    assert notes() == notes("trainer.optimizer.type=adamw") == notes(trainer="none") == []  # of a plain configuration
    without = [{"driver": False}, {"torch": "2.13.0+cpu"}, {"visible": ""}, {"visible": "-1"}, {"platform": "darwin"}]
    for settings in without:
        machine("flash_attn", "bitsandbytes", "vllm", **settings)
        assert why_no_cuda()
        found = notes(FLASH, PAGED, "generation.engine=vllm")
        assert len(found) == 3
        assert all(f" needs a CUDA device, and there is none here: {why_no_cuda()}; " in note for note in found)
        assert notes("trainer.optimizer.type=adamw_8bit", "quantization.bits=8") == []
    assert found[1].startswith("trainer.optimizer.type: paged_adamw ")
    assert found[2].endswith("; `brim predict` stops at it on this machine: set generation.engine: auto")
    for settings in ({}, {"visible": "0"}, {"platform": "win32", "driver": False}):  # where it cannot be told
        machine("flash_attn", "bitsandbytes", **settings)
        assert why_no_cuda() == ""
        said = [note.split("; ")[1] for note in notes(FLASH, PAGED)]
        assert said == ["a check loads no torch and cannot tell whether one is here"] * 2


def config_for(folder, **changes):
    return load_config({"base_model": str(folder), "trainer": {"type": "finetune"}, **changes}).config


def refused(config):
    """What is said before the model is built; empty where nothing is."""
    try:
        require_trainable(config, locate(config.base_model, config_only=True))
    except ConfigError as error:
        return str(error)
    return ""


def refused_by_peft(config):
    """What is said once it is built."""
    architecture = AutoConfig.from_pretrained(config.base_model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture)
        try:
            add_adapter(model, config.adapter, seed=0, trainable=True)
        except ModelError as error:
            return str(error)
    return ""


STORED = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def test_a_quantised_base_needs_an_adapter_to_train_and_none_to_predict(tmp_path):
    folder = write_folder(tmp_path, "llama")
    bits = {"quantization": {"bits": 8}}
    words = "quantization: a quantised base model is frozen, and without an adapter there is nothing to train\n  fix: set adapter: lora"
    assert refused(config_for(folder, **bits)).startswith(words)
    for changes in ({**bits, "adapter": "lora"}, {**bits, "trainer": {"type": "none"}}, {"quantization": None}):
        assert not refused(config_for(folder, **changes))
    stored = {**json.loads((folder / "config.json").read_text()), "quantization_config": STORED}
    (folder / "config.json").write_text(json.dumps(stored))
    assert refused(config_for(folder)).startswith(words)


WITH_EXPERTS = [name for name, settings in FAMILIES.items() if {"num_experts", "n_routed_experts"} & settings.keys()]
TARGETS = ["all-linear", ["q_proj"], ["gate_proj", "up_proj", "down_proj"], ["experts.w1", "w2", "experts.w3"], None]


@pytest.mark.parametrize("family", [*WITH_EXPERTS, "llama"])
def test_experts_with_dropout_are_refused_before_a_model_is_built_just_where_peft_refuses_them(tmp_path, family):
    folder = write_folder(tmp_path, family)
    words = "experts are among the target modules, which PEFT adapts without dropout only"
    for targets in TARGETS:
        adapter = {"type": "lora", "target_modules": targets}
        config = config_for(folder, adapter={**adapter, "dropout": 0.05})
        said = refused(config)
        assert (words in said) == (words in refused_by_peft(config)), targets
        assert said == "" or words in said
        without = config_for(folder, adapter={**adapter, "dropout": 0})
        assert refused(without) == ""
    assert words not in refused_by_peft(without)


def test_there_are_families_whose_experts_peft_adapts_and_adapters_that_go_on_are_not_refused(tmp_path):
    experts = {"type": "lora", "target_modules": "all-linear"}
    folders = {family: write_folder(tmp_path / family, family) for family in WITH_EXPERTS}
    adapted = {family for family, folder in folders.items() if refused(config_for(folder, adapter=experts))}
    assert {"mixtral", "qwen3_moe"} <= adapted < set(WITH_EXPERTS)
    folder = folders["mixtral"]
    assert not refused(config_for(folder, adapter=experts, trainer={"type": "none"}))  # a model that is not trained
    assert not refused(config_for(folder, adapter={**experts, "pretrained_adapter_weights": "trained"}))


def test_where_the_libraries_have_no_such_tables_nothing_is_known_before(tmp_path, monkeypatch):
    config = config_for(write_folder(tmp_path, "mixtral"), adapter={"type": "lora", "target_modules": "all-linear"})
    monkeypatch.setattr(needs, "_table", lambda *asked: {})
    assert not refused(config)
    monkeypatch.undo()
    (tmp_path / "made").mkdir()
    (tmp_path / "made/__init__.py").write_text("TABLE = {\n    made(): 1\n}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for package, file in (("no_such_package", "x.py"), ("made", "no_such_file.py"), ("made", "__init__.py")):
        assert needs._table(package, file, "TABLE") == {}
