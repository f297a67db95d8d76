"""What a failed verb shows."""

from __future__ import annotations

import json

from brim.cli.options import json_message, message, plain
from brim.errors import Problem


def test_all_problems_are_shown():
    problems = [Problem(what=f"fault {number}", fix="mend it") for number in range(40)]
    assert message(problems) == "\n".join(f"fault {number}\n  fix: mend it" for number in range(40))


def test_as_json_without_secrets():
    token = "hf_" + "a1" * 17
    told = json_message("ConfigError", [Problem(what=f"a\x1b {token}", where="c.yaml:1")], 2)
    assert "\n" not in told
    assert json.loads(told) == {
        "error": {
            "kind": "ConfigError",
            "exit_code": 2,
            "problems": [{"what": "a\x1b ***", "where": "c.yaml:1", "expected": "", "fix": ""}],
        }
    }


def test_nothing_steers_the_terminal():
    assert plain("a\x1b[31mb\x07\u202ec\ud800\td\ne é 日") == "a\\x1b[31mb\\x07\\u202ec\\ud800\\td\ne é 日"


def test_a_long_line_is_cut():
    assert plain("x" * 1000) == "x" * 1000
    assert plain("x" * 1001 + "\ny") == "x" * 999 + "…\ny"


def test_secrets_are_masked():
    assert plain("token hf_" + "a1" * 17 + " here") == "token *** here"
