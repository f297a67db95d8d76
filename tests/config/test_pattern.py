"""Regular expressions that end, and those that may not."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, strategies as st
from tests.properties import examples

from brim.config import load_config, pattern_fault
from brim.errors import ConfigError

NESTED = "a repeat or a choice stands inside a repeat, which can take for ever"
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn)\.(?:(?:q_proj|k_proj|v_proj)))"
)


@pytest.mark.parametrize(
    "pattern",
    ["q_proj", "q_proj|v_proj", r".*\.(q|v)_proj", r"model\.layers\.(\d+)\.mlp\..*", r"(a)\1", "(a|b)*c", "", UNSLOTH],
)
def test_plain_ones_are_taken(pattern):
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(a+)+$", NESTED),
        ("(.+)+Z", NESTED),
        ("(ab|ab)*c", NESTED),
        ("(a{1,3})*b", NESTED),
        ("((a?)?)*", NESTED),
        ("(?=(a+)+)b", NESTED),
        ("(a+){2,}", NESTED),
        ("(.*){3}Z", NESTED),
        (".*" * 5 + "Z", "5 open repeats follow each other, which can take for ever; 4 may"),
        ("a?" * 20 + "b", "it has 1,048,576 ways to match, more than 10,000"),
        ("x" * 2001, "it has 2,001 characters, more than 2,000"),
        ("(", "it is no regular expression: missing ), unterminated subpattern at position 0"),
        ("a{99999999999999}", "it is no regular expression: the repetition number is too large"),
    ],
)
def test_what_can_take_for_ever_is_refused(pattern, fault):
    assert pattern_fault(pattern) == fault


@examples(150)
@given(st.text(alphabet="ab()|*+?.{},12\\", max_size=14))
def test_what_is_taken_ends(pattern):
    if pattern_fault(pattern) is None:
        started = time.process_time()
        re.fullmatch(pattern, "ab" * 8 + "c")
        re.fullmatch(pattern, "a" * 24 + "c")
        assert time.process_time() - started < 5


def test_target_modules_are_checked_with_the_configuration():
    features = {"input_features": [{"name": "a", "type": "text"}], "output_features": [{"name": "b", "type": "text"}]}
    adapter = {"type": "lora", "target_modules": "(a+)+$"}
    with pytest.raises(ConfigError, match=r"adapter\.target_modules is refused as a regular expression: a repeat"):
        load_config({"base_model": "m", "adapter": adapter, **features})
