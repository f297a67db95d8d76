"""A trained adapter's own settings: read first, known, and not contradicted."""

import json

import pytest

from brim.config import LoraConfig
from brim.errors import ModelError
from brim.models.adapter_folder import CONFIG, WEIGHTS, continued, open_adapter

OWN = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["q_proj"], "bias": "none"}


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        (tmp_path / CONFIG).write_text(json.dumps({**OWN, **changes}))
        (tmp_path / WEIGHTS).touch()
        return str(tmp_path)

    return write


def settings(weights, **keys):
    return LoraConfig(type="lora", pretrained_adapter_weights=weights, **keys)


def test_what_is_left_open_is_the_adapters(write):
    weights = write(use_dora=True)
    merged = continued(settings(weights))
    assert merged == settings(weights, r=4, alpha=16, dropout=0.1, target_modules=["q_proj"], use_dora=True)
    assert continued(merged) == merged


def test_relative_paths_become_absolute(write, monkeypatch, tmp_path):
    write()
    monkeypatch.chdir(tmp_path.parent)
    assert continued(settings(tmp_path.name)).pretrained_adapter_weights == str(tmp_path.resolve())


def test_what_peft_leaves_out_is_its_default(tmp_path):
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA", "lora_alpha": 8.0}')
    (tmp_path / WEIGHTS).touch()
    own = open_adapter(str(tmp_path)).settings
    assert (own.r, own.alpha, own.dropout, own.bias_type, own.target_modules) == (8, 8, 0.0, "none", None)


def test_every_setting_that_contradicts_the_adapter_is_named(write):
    weights = write()
    with pytest.raises(ModelError) as caught:
        continued(settings(weights, r=8, alpha=16, dropout=0.05, bias_type="all", use_rslora=True, use_dora=False))
    assert [problem.what for problem in caught.value.problems] == [
        "adapter.r is 8, and the adapter to go on from has 4",
        "adapter.dropout is 0.05, and the adapter to go on from has 0.1",
        'adapter.bias_type is "all", and the adapter to go on from has "none"',
        "adapter.use_rslora is true, and the adapter to go on from has false",
    ]
    assert caught.value.problems[0].where == weights
    assert caught.value.problems[0].fix == (
        "take adapter.r out of the configuration, or train a new adapter (pretrained_adapter_weights: null)"
    )


def test_no_alpha_is_twice_r(write):
    assert continued(settings(write(lora_alpha=8), alpha=None)).r == 4
    with pytest.raises(ModelError, match=r"adapter\.alpha is 8, and the adapter to go on from has 16"):
        continued(settings(write(), alpha=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r'cannot be loaded: peft_type in adapter_config\.json is "IA3", not LORA'),
        ({"peft_type": None}, "is null, not LORA"),
        ({"code": "x.py", "base_model_class": "x"}, "that PEFT .* does not know: base_model_class, code\n"),
        (
            {"auto_mapping": {"base_model_class": "X", "parent_library": "os"}, "corda_config": {"cache_file": "/x"}},
            "make PEFT load other code or files: auto_mapping, corda_config\n",
        ),
        ({"megatron_core": "os", "megatron_config": {"a": 1}}, "code or files: megatron_config, megatron_core\n"),
        ({"r": "8"}, r'cannot be loaded: r in adapter_config\.json is "8"\n'),
        ({"lora_alpha": 0.5}, r"cannot be loaded: lora_alpha in adapter_config\.json is 0\.5\n"),
    ],
)
def test_settings_that_are_not_plain_lora_are_refused(write, changes, message):
    weights = write(**changes)
    with pytest.raises(ModelError, match=message) as caught:
        open_adapter(weights)
    assert caught.value.problems[0].where == weights


def test_what_peft_itself_writes_is_plain(write, tmp_path):
    import peft

    peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    (tmp_path / WEIGHTS).touch()
    assert open_adapter(str(tmp_path)).settings.target_modules == ("q_proj",)


def test_of_the_hub_only_two_files_are_fetched(write, monkeypatch, tmp_path):
    write()
    asked = []

    def fetch(repo, *, allow_patterns):
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    merged = continued(settings("someone/adapter"))
    assert asked == [("someone/adapter", ["adapter_config.json", "adapter_model.safetensors"])]
    assert (merged.r, merged.pretrained_adapter_weights) == (4, "someone/adapter")


def test_what_is_nowhere_is_an_error():
    with pytest.raises(ModelError, match="it is no local folder, and the Hub does not give it"):
        open_adapter("someone/adapter")
    with pytest.raises(ModelError, match="neither a local folder nor a valid Hub id"):
        open_adapter("/no/such/adapter")
