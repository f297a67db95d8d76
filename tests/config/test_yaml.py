"""YAML as values with places, and YAML that is none; what is written loads back, and holds no secret."""

import pytest
from hypothesis import given, strategies as st
from tests.config.conftest import CPU, least
from tests.messages import refused
from tests.properties import examples

from brim.config import load_config, resolve
from brim.config.schema import Config
from brim.config.text import dump, mask_secrets, mask_text, read_yaml
from brim.errors import ConfigError

ALPHANUMERIC = "0a1B2c3D" * 12
HF = "hf_" + ALPHANUMERIC[:34]
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w"


def test_values_are_yaml_1_2_and_places_are_lines_also_of_anchors_and_merges():
    value, places = read_yaml("a: 1e-4\nb:\n  - yes\n  - {c: ~}\nd: |\n  x\n  y\n", "f")
    assert value == {"a": 0.0001, "b": ["yes", {"c": None}], "d": "x\ny\n"}
    assert {path: place.where for path, place in places.items()} == {
        ("a",): "f:1", ("b",): "f:2", ("b", 0): "f:3", ("b", 1): "f:4", ("b", 1, "c"): "f:4", ("d",): "f:5"
    }  # fmt: skip
    value, places = read_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: {<<: [*x, {r: 4, p: 5}]}\nd: *x\n", "f")
    assert (value["b"], value["c"], value["d"]) == ({"q": 3, "p": 1}, {"p": 1, "q": 2, "r": 4}, {"p": 1, "q": 2})
    assert places[("b", "p")].where == "f:1"
    assert read_yaml(r'{"a": "\ud83d\ude00", "\ud83d\ude00": 1}', "f")[0] == {"a": "😀", "😀": 1}  # in two halves


NESTED = "f:1: too many nested values for a configuration … at most 20,000 values, nested at most 50 deep"
BACKSLASH = r"a backslash begins an escape; put a path such as C:\models in single quotes"
NO_YAML = [
    ("a: [1", "f:1: not YAML: … ',' or ']' … the end of the file … close the bracket or the quote that opens in line 1"),
    ("a:\n  b: 1\n c: 2", "f:3: not YAML: the line fits no section … align keys of one section"),
    (r'a: "C:\models"', f"f:1: not YAML: … unknown escape … {BACKSLASH}"),
    (r'a: "C:\users"', f"f:1: not YAML: … escape sequence … {BACKSLASH}"),
    ("a: b: c", "f:1: not YAML: a second colon on the line … in quotes"),
    ("a: 1\n---\nb: 2", "f:2: more than one YAML document"),
    ("a: !!python/object/apply:os.system [ls]", "f:1: the tag !!python/object/apply:os.system is not read"),
    ("a: &x [*x]", NESTED), ("a: " + "[" * 5000, NESTED),
    ("a: *x", "f:1: not YAML: found undefined alias 'x' … text that holds any of : # { } [ ] & * ! | > % @ ` goes in quotes"),
    ("<<: 3", "f:1: << needs a mapping … such as <<: *defaults"),
    ("a: 2001-99-99", "f:1: not YAML: month must be in 1..12 … in quotes"),
    ("a: " + "9" * 5000, "f:1: a number of too many digits"),
    ("a: '\0'", "f: not YAML: unacceptable character #x0000 … save it as plain UTF-8 text"),
    (r'a: "\ud83d"', "f:1: half a character … write the character itself"),
]  # fmt: skip


def test_what_is_not_read_and_aliases_of_aliases_do_not_explode():
    exploding = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 8)}]" for i in range(12)]
    for text, words in [*NO_YAML, ("\n".join(exploding), "… too many nested values")]:
        with refused(words, by=ConfigError):
            read_yaml(text, "f")
    with refused("f:1: b.c is given twice", "f:2: b is given twice"):
        read_yaml("b: {c: 1, c: 2}\nb: 3", "f")


def test_a_resolved_configuration_comes_back_from_its_file(tmp_path):
    trainer = {"type": "finetune", "learning_rate": "auto", "gradient_clipping": None, "optimizer": "adafactor"}
    prompt = {"template": "### {question}\n\n### Answer:\n"}
    config = resolve(load_config(least(adapter="lora", trainer=trainer, prompt=prompt)).config, CPU).config
    path = tmp_path / "config.yaml"
    text = dump(config, path)
    assert path.read_text(encoding="utf-8") == text
    loaded = load_config(path)
    assert (loaded.config, loaded.notes) == (config, ())
    literal = "prompt:\n  template: |\n    ### {question}\n\n    ### Answer:\n"
    assert all(words in text for words in (literal, "  alpha: 16\n", "  gradient_clipping: null\n"))


def test_a_cut_by_length_stays_one_and_small_numbers_are_numbers_to_readers_of_yaml_1_1_too():
    config = resolve(load_config(least(trainer={"type": "finetune", "effective_batch_size": 8})).config, CPU).config
    assert "  batch_size: auto\n" in dump(config)
    text = dump(load_config(least(trainer={"type": "finetune", "learning_rate": 1e-05})).config)
    assert "  batch_size: auto\n" not in text  # written without a batch, it is refused
    assert "learning_rate: 1.0e-05\n" in text
    assert "eps: 1.0e-08\n" in text


def test_secrets_are_left_out_of_what_is_written_and_nothing_else_is():
    config = Config.model_validate(least(base_model=f"https://me:{HF}@host/model", prompt={"template": HF}))
    text = dump(config)  # which was never loaded
    assert HF not in text
    assert "base_model: https://***@host/model\n" in text
    source = least(
        base_model="/mnt/hf_checkpoints/hf_" + "a" * 34 + "/llama",
        dataset="/data/ghp_" + "a" * 36,
        prompt={"template": "https://host/?api_key={question}&token=x https://{user}:{password}@host"},
        adapter={"type": "lora", "pretrained_adapter_weights": "/runs/AKIA" + "A" * 16},
    )
    assert "***" not in dump(load_config(source).config)


_TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)


@examples(50)
@given(
    name=_TEXT,
    template=_TEXT,
    fill=st.text(st.characters(exclude_categories=("Cs",)), max_size=10),
    rate=st.floats(1e-300, 1.0),
    bias=st.lists(st.tuples(st.lists(st.integers(0, 10**6), max_size=3), st.floats(-1e6, 1e6)), max_size=3),
)
def test_any_text_and_number_comes_back(tmp_path_factory, name, template, fill, rate, bias):
    source = least(
        dataset=name,
        input_features=[{"name": "(input)", "type": "text", "preprocessing": {"fill_value": fill}}],
        prompt={"template": template.replace("{", "{{").replace("}", "}}")},
        trainer={"type": "finetune", "learning_rate": rate},
        generation={"sequence_bias": [list(pair) for pair in bias]},
    )
    config = load_config(source).config
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    if "***" not in dump(config, path):
        assert load_config(path).config == config


def test_secrets_are_masked_and_what_is_none_stays():
    secrets = ["ghp_" + ALPHANUMERIC[:36], "github_pat_" + ALPHANUMERIC[:82], "glpat-" + ALPHANUMERIC[:20]]
    secrets += ["sk-" + ALPHANUMERIC[:48], "sk-proj-" + ALPHANUMERIC, "sk-ant-api03-" + ALPHANUMERIC]
    secrets += ["AKIA" + "A1B2C3D4" * 2, "xoxb-123456789012-abcdefghijkl", HF]
    assert [mask_text(secret) for secret in secrets] == ["***"] * len(secrets)
    assert mask_text(f"token {HF} here") == "token *** here"
    assert mask_text(f"Bearer {JWT}.") == "Bearer ***."
    for login in ("user:pass", HF):
        assert mask_text(f"https://{login}@host/model") == "https://***@host/model"
    plain = ["me@example.org writes hf_model, sk-learn", "models/llama-2-7b-hf", "/mnt/hf_checkpoints/llama"]
    plain += ["hf_" + "a" * 33, "hf_" + "a" * 35, "my_" + HF, "/data/sk-imaging-experiments-2024/rows.csv"]
    plain += ["https://host/d.csv?api_key={question}", "https://{user}:{password}@host", "https://host:8080/a@b"]
    plain += ["Bearer in mind", "password: {password}"]
    assert [mask_text(text) for text in plain] == plain


def test_paths_keep_their_parts():
    values = {"base_model": f"/models/{HF}", "dataset": f"/d/{HF}", "prompt": {"template": HF}, "x": [HF, 3, None]}
    assert mask_secrets(values) == {**values, "prompt": {"template": "***"}, "x": ["***", 3, None]}
    assert mask_secrets({"dataset": "https://u:p@host/d"}) == {"dataset": "https://***@host/d"}


def test_the_environments_secrets_are_masked_whatever_they_look_like(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "quite ordinary words")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a/b+c" * 4)
    monkeypatch.setenv("SHORT_TOKEN", "short")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a value of no secrecy")
    assert mask_text("x quite ordinary words y short a value of no secrecy") == "x *** y short a value of no secrecy"
    assert mask_text("?key=a%2Fb%2Bc" + "a%2Fb%2Bc" * 3) == "?key=***"
    assert mask_secrets({"dataset": "/d/quite ordinary words/x"}) == {"dataset": "/d/***/x"}
    with pytest.raises(ConfigError, match="a secret stands in the configuration, in base_model") as caught:
        load_config(least(base_model="/models/quite ordinary words"))
    assert "ordinary" not in str(caught.value)


def test_a_secret_in_the_configuration_is_refused_and_no_message_repeats_it():
    for keys, where in [
        ({"prompt": {"template": f"{{question}} {HF}"}}, "prompt.template"),
        ({"base_model": f"https://me:{HF}@host/model"}, "base_model"),
        ({"adapter": {"type": "lora", "target_modules": ["q", HF]}}, "adapter.target_modules.1"),
        ({"output_features": [{"name": HF, "type": "text"}]}, "output_features.0.name"),
    ]:
        with refused(f"{where}: a secret stands in the configuration, in {where} … environment") as caught:
            load_config(least(**keys))
        assert HF not in str(caught.value)
    overrides = [f"prompt.template={HF}", f"trainer.epochs={HF}", f"trainer.type={HF}", f"x={HF}", HF]
    values = [{"precision": HF}, {"adapter": HF}, {"api_key": HF}, {"trainer": {"type": "finetune", "epochs": HF}}]
    for keys, written in [*(({}, [override]) for override in overrides), *((keys, []) for keys in values)]:
        with pytest.raises(ConfigError) as caught:
            load_config(least(**keys), written)
        assert HF not in str(caught.value)
