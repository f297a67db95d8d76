"""Whatever is done to a valid configuration, it loads or is refused with a place."""

from __future__ import annotations

import copy
import datetime

from hypothesis import given, strategies as st
from tests.properties import examples

from brim.config import load_config
from brim.errors import ConfigError

VALID = {
    "model_type": "llm",
    "base_model": "model",
    "input_features": [{"name": "prompt", "type": "text", "preprocessing": {"max_sequence_length": 8}}],
    "output_features": [{"name": "answer", "type": "text", "decoder": {"type": "text_extractor"}}],
    "prompt": {"template": "{question}"},
    "adapter": {"type": "lora", "target_modules": ["q"], "postprocessor": {"progressbar": False}},
    "trainer": {
        "type": "finetune",
        "batch_size": 2,
        "effective_batch_size": 8,
        "batch_search": "binary",
        "enable_gradient_checkpointing": "auto",
        "optimizer": {"type": "adam", "betas": [0.9, 0.99]},
        "batch_rampup": {"length": "0.1dur", "from": 2, "shape": "linear", "increment": 2},
        "batch_beta2_scaling": True,
        "noise_scale_every": 5,
        "learning_rate_scheduler": {"decay": "wsd", "warmup_length": "5ba", "decay_length": "0.2dur"},
        "gradient_clipping": {"clipvalue": 1.0},
    },
    "generation": {"temperature": 0.5, "sequence_bias": [[[1], 2.0]], "eos_token_id": [1]},
    "preprocessing": {"split": {"type": "hash", "column": "c", "probabilities": [0.5, 0.25, 0.25]}},
    "memory": {"budget": "14 GiB", "margin": 0.05},
    "backend": {"type": "local"},
}


def _paths(value, path=()):
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(item, (*path, key))


PATHS = [path for path in _paths(VALID) if path]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "lora", "none", "dpo", "", "{a.b}", datetime.date(2001, 1, 1), b"x", {1}, object()])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def _problems(source, overrides=()):
    """The problems with which a configuration is refused; none if it loads. Any other exception fails the test."""
    try:
        load_config(source, overrides)
    except ConfigError as error:
        return error.problems
    return ()


@st.composite
def mutated(draw):
    """A valid configuration with a few values replaced, keys misspelt, or entries taken out."""
    config = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(PATHS))
        at = config
        try:
            for part in parents:
                at = at[part]
            value = at[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
        if isinstance(at, str):
            continue  # an earlier change put a text there
        change = draw(st.sampled_from(["replace", "misspell", "remove", "add"]))
        if change == "replace" or not isinstance(at, dict):
            at[last] = draw(VALUES)
        elif change == "misspell":
            position = draw(st.integers(0, len(last)))
            at[last[:position] + draw(st.text(min_size=1, max_size=2)) + last[position:]] = at.pop(last)
        elif change == "remove":
            del at[last]
        elif isinstance(value, dict):
            value[draw(st.text(max_size=10))] = draw(VALUES)
    return config


@examples(300)
@given(mutated())
def test_a_changed_configuration_loads_or_is_refused_with_a_place(config):
    problems = _problems(config)
    assert all(problem.what and problem.where for problem in problems)
    assert not any("Input should be" in problem.what for problem in problems)


@examples(200)
@given(
    st.sampled_from([".".join(str(part) for part in path) for path in PATHS]) | st.text(max_size=10),
    st.text(max_size=20),
)
def test_any_override_is_taken_or_refused_with_a_place(key, value):
    assert all(problem.what and problem.where for problem in _problems(VALID, [f"{key}={value}"]))


@examples(300)
@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
    | st.text(alphabet="ab:-[]{}&*!'\"#|>\n ?%,<", max_size=40)
)
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert all(problem.what and problem.where.startswith(str(path)) for problem in _problems(path))
