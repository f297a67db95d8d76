"""What a failed verb shows."""

from __future__ import annotations

from brim.cli.message import message, plain
from brim.errors import ConfigError, Problem


def test_the_first_problems_are_shown_and_the_others_counted():
    problems = [Problem(what=f"fault {number}", fix="mend it") for number in range(10)]
    lines = message(ConfigError(*problems)).splitlines()
    assert lines[:2] == ["fault 0", "  fix: mend it"]
    assert len(lines) == 17
    assert lines[-1] == "and 2 more problems"
    assert message(ConfigError(*problems[:9])).endswith("and 1 more problem")
    assert message(ConfigError(*problems[:8])).endswith("fault 7\n  fix: mend it")


def test_nothing_steers_the_terminal():
    assert plain("a\x1b[31mb\x07\u202ec\ud800\td\ne é 日") == "a\\x1b[31mb\\x07\\u202ec\\ud800\\td\ne é 日"


def test_a_long_line_is_cut():
    assert plain("x" * 1000) == "x" * 1000
    assert plain("x" * 1001 + "\ny") == "x" * 999 + "…\ny"


def test_secrets_are_masked():
    assert plain("token hf_" + "a1" * 17 + " here") == "token *** here"
