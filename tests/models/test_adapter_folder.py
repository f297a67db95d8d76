"""A trained adapter's own settings: read first, known, and not contradicted."""

import json
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.messages import refused

from brim.config.schema import LoraConfig
from brim.errors import ModelError
from brim.models.folders import CONFIG, WEIGHTS, continued, open_adapter

OWN = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["q_proj"], "bias": "none"}
FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def weights_of_rank(folder, rank):
    save_file({FACTOR: np.zeros((rank, 3), np.float32)}, folder / WEIGHTS)


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        (tmp_path / CONFIG).write_text(json.dumps({**OWN, **changes}))
        weights_of_rank(tmp_path, 4)
        return str(tmp_path)

    return write


def settings(weights, **keys):
    return LoraConfig(type="lora", pretrained_adapter_weights=weights, **keys)


def test_what_is_left_open_is_the_adapters(write, tmp_path, monkeypatch):
    weights = write(use_dora=True)
    merged = continued(settings(weights))
    assert merged == settings(weights, r=4, alpha=16, dropout=0.1, target_modules=["q_proj"], use_dora=True)
    assert continued(merged) == merged
    monkeypatch.chdir(tmp_path.parent)  # relative paths become absolute
    assert continued(settings(tmp_path.name)).pretrained_adapter_weights == str(tmp_path.resolve())
    assert continued(settings(write(lora_alpha=8), alpha=None)).r == 4  # no alpha is twice r
    with pytest.raises(ModelError, match=r"adapter\.alpha is 8, and the adapter to go on from has 16"):
        continued(settings(write(), alpha=None))


def test_what_peft_writes_and_leaves_out_is_plain(write, tmp_path):
    import peft

    (tmp_path / CONFIG).write_text('{"peft_type": "LORA", "lora_alpha": 8.0}')
    weights_of_rank(tmp_path, 8)
    own = open_adapter(str(tmp_path)).settings
    assert (own.r, own.alpha, own.dropout, own.bias_type, own.target_modules) == (8, 8, 0.0, "none", None)
    peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    assert open_adapter(str(tmp_path)).settings.target_modules == ("q_proj",)
    # Newer settings that are off are no matter, and each layer's own rank is read.
    assert open_adapter(write(use_something_new=False, new_config=None, loftq_config={})).settings.r == 4
    assert open_adapter(write(r=2, rank_pattern={"q_proj": 4})).settings.r == 2


def test_every_setting_that_contradicts_the_adapter_is_named(write):
    weights = write()
    contradictions = {"r": ("8", "4"), "dropout": ("0.05", "0.1"), "bias_type": ('"all"', '"none"')}
    fix = "fix: take adapter.{key} out of the configuration, or train a new adapter"
    words = [
        f"{weights}: adapter.{key} is {ours}, and the adapter to go on from has {theirs}\n … {fix.format(key=key)}"
        for key, (ours, theirs) in {**contradictions, "use_rslora": ("true", "false")}.items()
    ]
    with refused(*words, by=ModelError):
        continued(settings(weights, r=8, alpha=16, dropout=0.05, bias_type="all", use_rslora=True, use_dora=False))


def test_settings_that_are_not_plain_lora_are_refused(write):
    for changes, message in [
        ({"peft_type": "IA3"}, r'cannot be loaded: peft_type in adapter_config\.json is "IA3", not LORA'),
        ({"peft_type": None}, "is null, not LORA"),
        ({"code": "x.py", "base_model_class": "x"}, "that brim does not know: base_model_class, code\n"),
        (
            {"auto_mapping": {"base_model_class": "X", "parent_library": "os"}, "corda_config": {"cache_file": "/x"}},
            "make PEFT load other code or files: auto_mapping, corda_config\n",
        ),
        ({"megatron_core": "os", "megatron_config": {"a": 1}}, "code or files: megatron_config, megatron_core\n"),
        ({"r": "8"}, r'cannot be loaded: r in adapter_config\.json is "8"\n'),
        ({"lora_alpha": 0.5}, r"cannot be loaded: lora_alpha in adapter_config\.json is 0\.5\n"),
        ({"layer_replication": [[0, 10**9]]}, "code or files: layer_replication\n"),
        ({"target_modules": "(a+)+$"}, r"cannot be loaded: target_modules in .* is \"\(a\+\)\+\$\"\n"),
        ({"rank_pattern": {"(a+)+": 4}}, "cannot be loaded: rank_pattern in"),
        ({"modules_to_save": ["(a+)+"]}, "cannot be loaded: modules_to_save in"),
        ({"r": 10**9}, rf"{FACTOR} in {WEIGHTS} has 4 rows, and r in {CONFIG} is 1000000000\n"),
        ({"r": 10**400}, "r in adapter_config.json is a number of too many digits"),
        ({"inference_mode": "no"}, 'inference_mode in adapter_config.json is "no"'),
    ]:
        weights = write(**changes)
        with pytest.raises(ModelError, match=message) as caught:
            open_adapter(weights)
        assert caught.value.problems[0].where == weights


def test_of_the_hub_only_two_files_are_fetched(write, monkeypatch, tmp_path):
    write()
    fetch = Mock(return_value=str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    merged = continued(settings("someone/adapter"))
    fetch.assert_called_once_with("someone/adapter", allow_patterns=[CONFIG, WEIGHTS])
    assert (merged.r, merged.pretrained_adapter_weights) == (4, "someone/adapter")


def test_weights_that_are_none_damaged_or_elsewhere(write, tmp_path, tmp_path_factory):
    with pytest.raises(ModelError, match="it is not a local folder, and the Hub does not give it"):
        open_adapter("someone/adapter")
    with pytest.raises(ModelError, match="neither a local folder nor a valid Hub id"):
        open_adapter("/no/such/adapter")
    weights = write()
    for text in ("[" * 100_000, "[]", "{", "{}"):
        (tmp_path / CONFIG).write_text(text)
        with pytest.raises(ModelError, match=CONFIG):
            open_adapter(weights)
    write()
    (tmp_path / WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=rf"cannot be loaded: {WEIGHTS} is damaged"):
        open_adapter(weights)
    save_file({"other": np.zeros(3)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=rf"{WEIGHTS} holds no LoRA weights"):
        open_adapter(weights)
    elsewhere = (tmp_path / WEIGHTS).rename(tmp_path_factory.mktemp("elsewhere") / WEIGHTS)
    (tmp_path / WEIGHTS).symlink_to(elsewhere)
    with pytest.raises(ModelError, match=f"{WEIGHTS} is a link that leaves the folder"):
        open_adapter(weights)


@pytest.mark.process
def test_neither_torch_nor_peft_is_imported(write):
    code = "import sys; from brim.models.folders import open_adapter; open_adapter(sys.argv[1]); "
    code += "assert not {'torch', 'peft', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, write()], check=True)
