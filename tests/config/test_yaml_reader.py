"""YAML as values with places, and YAML that is none."""

from __future__ import annotations

import pytest

from brim.config import read_yaml
from brim.errors import ConfigError

HOW = "write lines of the form `key: value`; text that holds any of : # { } [ ] & * ! | > % @ ` goes in quotes"


def test_values_are_yaml_1_2_and_places_are_lines():
    text = "a: 1e-4\nb:\n  - yes\n  - {c: ~}\nd: |\n  x\n  y\n"
    value, places = read_yaml(text, "f")
    assert value == {"a": 0.0001, "b": ["yes", {"c": None}], "d": "x\ny\n"}
    assert {path: place.where for path, place in places.items()} == {
        ("a",): "f:1",
        ("b",): "f:2",
        ("b", 0): "f:3",
        ("b", 1): "f:4",
        ("b", 1, "c"): "f:4",
        ("d",): "f:5",
    }


def test_anchors_and_merges_are_followed():
    text = "a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: {<<: [*x, {r: 4, p: 5}]}\nd: *x\n"
    value, places = read_yaml(text, "f")
    assert value["b"] == {"q": 3, "p": 1}
    assert value["c"] == {"p": 1, "q": 2, "r": 4}
    assert value["d"] == {"p": 1, "q": 2}
    assert places[("b", "p")].where == "f:1"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("a: 1\na: 2", ["f:2: a is given twice\n  expected: one value; the first is at f:1\n  fix: keep one of them"]),
        (
            "b: {c: 1, c: 2}\nb: 3",
            [
                "f:1: b.c is given twice\n  expected: one value; the first is at f:1\n  fix: keep one of them",
                "f:2: b is given twice\n  expected: one value; the first is at f:1\n  fix: keep one of them",
            ],
        ),
        (
            "a: [1",
            [
                "f:1: not YAML: expected ',' or ']', but got the end of the file\n"
                "  fix: close the bracket or the quote that opens in line 1"
            ],
        ),
        ("a:\n  b: 1\n c: 2", ["f:3: not YAML: the line fits no section\n  fix: align keys of one section"]),
        ("a: 1\n\tb: 1", ["f:2: not YAML: a tab in the indentation\n  fix: indent with spaces"]),
        (
            r'a: "C:\models"',
            [
                "f:1: not YAML: found unknown escape character 'm'\n"
                r"  fix: in double quotes a backslash begins an escape; put a path such as C:\models in single quotes"
            ],
        ),
        (
            r'a: "C:\users"',
            [
                "f:1: not YAML: expected escape sequence of 4 hexdecimal numbers, but found 's'\n"
                r"  fix: in double quotes a backslash begins an escape; put a path such as C:\models in single quotes"
            ],
        ),
        (
            "a: b: c",
            [
                "f:1: not YAML: a second colon on the line, or a wrong indentation\n"
                "  fix: put text that holds a colon in quotes, a space after each key's colon, and align keys of one section"
            ],
        ),
        ("a: 1\n---\nb: 2", ["f:2: more than one YAML document\n  expected: one configuration in the file"]),
        (
            "a: !!python/object/apply:os.system [ls]",
            [
                "f:1: the tag !!python/object/apply:os.system is not read\n"
                "  fix: write a plain value, or put it in quotes"
            ],
        ),
        (
            "a: &x [*x]",
            [
                "f:1: too many nested values for a configuration\n"
                "  expected: at most 20,000 values, nested at most 50 deep"
            ],
        ),
        ("a: *x", [f"f:1: not YAML: found undefined alias 'x'\n  fix: {HOW}"]),
        (
            "<<: 3",
            ["f:1: << needs a mapping\n  expected: an alias of another mapping, such as <<: *defaults"],
        ),
        ("a: 2001-99-99", ["f:1: not YAML: month must be in 1..12\n  fix: put it in quotes if it is text"]),
        ("a: " + "9" * 5000, ["f:1: a number of too many digits\n  fix: put it in quotes if it is text"]),
        (
            "a: " + "[" * 5000,
            [
                "f:1: too many nested values for a configuration\n"
                "  expected: at most 20,000 values, nested at most 50 deep"
            ],
        ),
        (
            "a: '\0'",
            [
                "f: not YAML: unacceptable character #x0000: special characters are not allowed\n"
                "  fix: save it as plain UTF-8 text"
            ],
        ),
        (
            r'a: "\ud83d"',
            [r"f:1: half a character, escaped as \uD800 to \uDFFF" "\n  fix: write the character itself"],
        ),
    ],
)
def test_what_is_not_read(text, messages):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "f")
    assert [str(problem) for problem in caught.value.problems] == messages


def test_json_writes_an_emoji_in_two_halves():
    assert read_yaml(r'{"a": "\ud83d\ude00", "\ud83d\ude00": 1}', "f")[0] == {"a": "😀", "😀": 1}


def test_aliases_of_aliases_do_not_explode():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="too many nested values"):
        read_yaml("\n".join(lines), "f")
