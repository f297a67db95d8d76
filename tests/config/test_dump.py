"""What is written loads back to an equal configuration, and holds no secret."""

from __future__ import annotations

from hypothesis import given, strategies as st

from brim.config import DeviceFacts, dump, load_config, resolve
from brim.config.schema import Config

CPU = DeviceFacts(kind="cpu", bf16=False)


def _source(**keys):
    return {
        "base_model": "model",
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        **keys,
    }


def test_a_resolved_configuration_comes_back_from_its_file(tmp_path):
    source = _source(
        adapter={"type": "lora", "target_modules": ["q_proj"]},
        trainer={"type": "finetune", "learning_rate": "auto", "gradient_clipping": None, "optimizer": "adafactor"},
        prompt={"template": "### {question}\n\n### Answer:\n"},
        generation={"eos_token_id": [1, 2], "sequence_bias": [[[1, 2], -0.5]]},
        preprocessing={"split": {"type": "hash", "column": "id"}},
    )
    config = resolve(load_config(source).config, CPU).config
    path = tmp_path / "config.yaml"
    text = dump(config, path)
    assert path.read_text(encoding="utf-8") == text
    loaded = load_config(path)
    assert loaded.config == config
    assert loaded.notes == ()
    assert "prompt:\n  template: |\n    ### {question}\n\n    ### Answer:\n" in text
    assert "  alpha: 16\n" in text
    assert "  gradient_clipping: null\n" in text


def test_a_cut_by_length_stays_one():
    config = resolve(load_config(_source(trainer={"type": "finetune", "effective_batch_size": 8})).config, CPU).config
    assert "  batch_size: auto\n" in dump(config)
    untouched = load_config(_source(trainer={"type": "finetune"})).config
    assert "  batch_size: auto\n" not in dump(untouched)  # written without a batch, it is refused


def test_a_config_that_was_never_loaded_is_written_without_its_secrets():
    token = "hf_" + "a1B2c3" * 5 + "d4E5"
    config = Config.model_validate(_source(base_model=f"https://me:{token}@host/model", prompt={"template": token}))
    text = dump(config)
    assert token not in text
    assert "base_model: https://***@host/model\n" in text


def test_paths_and_templates_are_written_as_they_are():
    source = _source(
        base_model="/mnt/hf_checkpoints/hf_" + "a" * 34 + "/llama",
        dataset="/data/ghp_" + "a" * 36,
        prompt={"template": "https://host/?api_key={question}&token=x https://{user}:{password}@host"},
        adapter={"type": "lora", "pretrained_adapter_weights": "/runs/AKIA" + "A" * 16},
    )
    config = load_config(source).config
    assert "***" not in dump(config)


_TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)


@given(
    name=_TEXT,
    template=_TEXT,
    fill=st.text(st.characters(exclude_categories=("Cs",)), max_size=10),
    rate=st.floats(1e-300, 1.0),
    bias=st.lists(st.tuples(st.lists(st.integers(0, 10**6), max_size=3), st.floats(-1e6, 1e6)), max_size=3),
)
def test_any_text_and_number_comes_back(tmp_path_factory, name, template, fill, rate, bias):
    source = _source(
        dataset=name,
        input_features=[{"name": "(input)", "type": "text", "preprocessing": {"fill_value": fill}}],
        prompt={"template": template.replace("{", "{{").replace("}", "}}")},
        trainer={"type": "finetune", "learning_rate": rate},
        generation={"sequence_bias": [list(pair) for pair in bias]},
    )
    config = load_config(source).config
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    text = dump(config, path)
    if "***" not in text:
        assert load_config(path).config == config
    assert isinstance(config, Config)


def test_small_numbers_are_numbers_to_readers_of_yaml_1_1_too():
    text = dump(load_config(_source(trainer={"type": "finetune", "learning_rate": 1e-05})).config)
    assert "learning_rate: 1.0e-05\n" in text
    assert "eps: 1.0e-08\n" in text
