"""The grammar of prompt templates."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from brim.config import names, render
from brim.config.template import Placeholder, parse_template
from brim.errors import ConfigError, DataError


def test_literals_placeholders_formats_and_escapes():
    parts = parse_template('Say "{a b}" for {price:.2f} EUR, as {{json}}: {__sample__}')
    assert parts == (
        'Say "',
        Placeholder(name="a b"),
        '" for ',
        Placeholder(name="price", format_spec=".2f"),
        " EUR, as {json}: ",
        Placeholder(name="__sample__"),
    )
    assert names(parts) == ("a b", "price", "__sample__")
    values = {"a b": "x", "price": 3, "__sample__": "{y}"}
    assert render(parts, values) == 'Say "x" for 3.00 EUR, as {json}: {y}'


@pytest.mark.parametrize("name", ["a", "Review Text", "größe", "x-1", "total (EUR)", "a/b", "0", "a_b", "_"])
def test_columns_may_be_called_what_they_like(name):
    assert parse_template("{" + name + "}") == (Placeholder(name=name),)


def test_nothing_and_text_alone():
    assert parse_template("") == ()
    assert parse_template("a {{}} b") == ("a {} b",)


_PLAIN = "  expected: a column's name in braces, without dots, brackets or conversions"
_BRACES = "  fix: write {{ and }} for literal braces"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{x.__class__}", f"prompt.template: {{x.__class__}} is not a plain name\n{_PLAIN}"),
        ("{x[0]}", f"prompt.template: {{x[0]}} is not a plain name\n{_PLAIN}"),
        ("{x!r}", f"prompt.template: {{x!r}} is not a plain name\n{_PLAIN}"),
        ("{}", f"prompt.template: {{}} is not a plain name\n{_PLAIN}\n{_BRACES}"),
        ('{"a": 1}', f'prompt.template: {{"a": 1}} is not a plain name\n{_PLAIN}\n{_BRACES}'),
        ("{ a }", f"prompt.template: {{ a }} is not a plain name\n{_PLAIN}\n{_BRACES}"),
        (
            "{x:{y}}",
            f"prompt.template: {{x:{{y}} is not a plain name\n{_PLAIN}\n"
            f"prompt.template: a }} closes nothing near '{{x:{{y}}}}'\n{_BRACES}",
        ),
        (
            "{x:9999999f}",
            "prompt.template: '9999999f' in {x:9999999f} is no number format\n"
            f"  expected: a format such as {{x:.2f}}\n{_BRACES}",
        ),
        (
            "{x:}",
            f"prompt.template: '' in {{x:}} is no number format\n  expected: a format such as {{x:.2f}}\n{_BRACES}",
        ),
        ("a {b", f"prompt.template: a {{ is never closed near '{{b'\n{_BRACES}"),
        ("a } b", f"prompt.template: a }} closes nothing near 'a }}'\n{_BRACES}"),
        (
            "{__task__:>9}",
            "prompt.template: {__task__:>9} is text, which takes no format\n  fix: write {__task__}",
        ),
        (
            "{__dict__}",
            "prompt.template: {__dict__} is no placeholder\n"
            "  fix: use a column's name, or one of {__sample__}, {__task__}, {__context__}, {__labels__}",
        ),
    ],
)
def test_what_is_refused(template, message):
    with pytest.raises(ConfigError) as caught:
        parse_template(template)
    assert str(caught.value) == message


def test_a_value_that_does_not_fit_its_format():
    with pytest.raises(DataError) as caught:
        render(parse_template("{x:.2f}"), {"x": "many"})
    assert str(caught.value) == (
        "column x holds 'many', which the format {x:.2f} of prompt.template does not fit\n  expected: a number"
    )


@given(st.text(alphabet="{}ab.[]!:_09f \"'\n", max_size=30))
def test_any_text_is_parsed_or_refused_and_reaches_into_nothing(template):
    try:
        parts = parse_template(template)
    except ConfigError:
        return
    values = dict.fromkeys(names(parts), 7)
    assert isinstance(render(parts, values), str)
    assert not any(set(name) & set(".[]!{}:") for name in names(parts))


@given(st.text(max_size=40))
def test_doubled_braces_give_any_text_back(text):
    assert render(parse_template(text.replace("{", "{{").replace("}", "}}")), {}) == text


@given(st.lists(st.sampled_from(["a", "b c", "{{", "}}", "x\n", "{a}", "{b c}", "{a:.1f}"]), max_size=10))
def test_rendering_agrees_with_str_format_where_both_are_safe(pieces):
    template = "".join(pieces)
    values = {"a": 1.25, "b c": "two {braces}"}
    assert render(parse_template(template), values) == template.format(**values)
