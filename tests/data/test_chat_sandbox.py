"""Foreign templates reach nothing and come to an end."""

import datetime

import pytest

from brim.data.chat import sandbox as chat_sandbox
from brim.data.chat.sandbox import MAX_CHARACTERS, MAX_STEPS, BoundedEnvironment, Overreach, TemplateFault

TOO_LONG = f"it makes a text of more than {MAX_CHARACTERS:,} characters"
FEW_STEPS = 20_000
ENDLESS = f"it does not come to an end within {FEW_STEPS:,} passes of its loops"
TOO_WIDE = "it asks for more than 99,999 spaces"
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


def doubling(start, step, end=""):
    return DOUBLING.replace("START", start).replace("STEP", step) + end


def rendered(source, **variables):
    environment = BoundedEnvironment(today=datetime.date(2026, 1, 31))
    return environment.run(environment.compiled(source), variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'a': 'ü<'} | tojson }} {{ [1] | tojson(indent=1) }}", '{"a": "ü<"} [\n 1\n]'),
        ("{{ strftime_now('%d %b %Y %H') }}", "31 Jan 2026 00"),
        (
            "{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "13",
        ),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% generation %}{% set x = 1 %}a{{ x }}{% endgeneration %}{{ x }}", "a1"),
        ("{{ 'a' ~ 1 ~ [1] }}{{ missing }}{{ missing is defined }}", "a1[1]False"),
        (
            "{{ '**%s** {}'.format(1) }} {{ '**%s** %05.1f' % ('a', 2.25) }} {{ '{{{}}}'.format(3) }}",
            "**%s** 1 **a** 002.2 {3}",
        ),
        ("{% set ns = namespace(found=false) %}{% set ns.found = true %}{{ ns.found }}", "True"),
        ("{{ dict(a=1) }} {{ dict.fromkeys(['b'], 2) }}", "{'a': 1} {'b': 2}"),
        (
            "{{ 'ab'.center(4) }}|{{ 'a\nb' | indent(2) }}|{{ 'x' * 3 }}|{{ 2 ** 10 }}|{{ 7 % 4 }}",
            " ab |a\n  b|xxx|1024|3",
        ),
        (
            "{{ ['a', 'b'] | join('-') }} {{ 'aXa'.replace('X', 'Y') }} {{ messages | map(attribute='role') | list }}",
            "a-b aYa ['user']",
        ),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}", "<1>"),
    ],
)
def test_what_templates_use_works(source, text):
    assert rendered(source, messages=[{"role": "user"}]) == text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ ''.__class__ }}", "it reaches for '__class__' of a str, which a template may not"),
        ("{{ ''['__class__'] }}", "it reaches for '__class__' of a str, which a template may not"),
        ("{{ '' | attr('__class__') }}", "it reaches for '__class__' of a str, which a template may not"),
        ("{{ '{x.__class__}'.format(x=1) }}", "it reaches for '__class__' of a int, which a template may not"),
        ("{{ cycler.__init__.__globals__ }}", "it reaches for '__init__' of a type, which a template may not"),
        ("{{ raise_exception.__globals__ }}", "it reaches for '__globals__' of a function, which a template may not"),
        ("{{ messages.append(1) }}", "it reaches for 'append' of a list, which a template may not"),
        ("{% set ns = namespace() %}{% set ns.__x = 1 %}", "it sets the hidden attribute '__x' of a namespace"),
        ("{% for i in range(10**9) %}{% endfor %}", r"Range too big\. The sandbox blocks .*"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", ENDLESS),
        ("{% macro m(n) %}{% if n %}{% for i in [1, 2] %}{{ m(n - 1) }}{% endfor %}{% endif %}{% endmacro %}{{ m(20) }}", ENDLESS),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", f"it writes more than {MAX_CHARACTERS:,} characters"),
        ("{{ 'x' * 10**10 }}", TOO_LONG),
        ("{{ 10 ** (10 ** 9) }}", "it computes a number that is too large"),
        (doubling("7", "ns.x * ns.x"), "it computes a number that is too large"),
        (doubling("'x'", "ns.x + ns.x"), TOO_LONG),
        (doubling("'x'", "ns.x ~ ns.x"), TOO_LONG),
        (doubling("'x'", "[ns.x, ns.x]", "{{ ns.x }}"), TOO_LONG),
        (doubling("'x'", "[ns.x, ns.x]", "{{ ns.x | tojson }}"), TOO_LONG),
        (doubling("'x'", "[ns.x, ns.x]", "{{ ns.x | string }}"), TOO_LONG),
        (doubling("'xx'", "ns.x.replace('x', 'xx')"), TOO_LONG),
        (doubling("'xx'", "ns.x | replace('x', 'xx')"), TOO_LONG),
        (doubling("'xx'", "ns.x.join([ns.x, ns.x])"), TOO_LONG),
        ("{{ 'x'.center(10**9) }}", TOO_WIDE),
        ("{{ 'x' | center(10**9) }}", TOO_WIDE),
        ("{{ 'x' | indent(10**9) }}", TOO_WIDE),
        ("{{ 'x' | tojson(indent=10**9) }}", TOO_WIDE),
        ("{{ '%1000000000d' % 1 }}", TOO_LONG),
        ("{{ '%*d' % (10**9, 1) }}", TOO_LONG),
        ("{{ '%1000000000d' | format(1) }}", TOO_LONG),
        ("{{ '{:1000000000}'.format(1) }}", TOO_LONG),
        ("{{ '{:{w}}'.format(1, w=10**9) }}", TOO_LONG),
        ("{{ strftime_now('%1000000000d') }}", TOO_LONG),
        ("{{ [1, 2] | random }}", r"it draws by chance .*"),
    ],
)  # fmt: skip
def test_what_no_template_may_is_refused(source, why, monkeypatch):
    monkeypatch.setattr(chat_sandbox, "MAX_STEPS", FEW_STEPS)
    with pytest.raises(Overreach, match=f"^{why}$"):
        rendered(source, messages=[{}])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{{ messages.x.y }}", "'list object' has no attribute 'x'"),
        ("{{ 'a' + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "it is nested too deeply"),
        ("{% include 'x' %}", "TypeError: no loader for this environment specified"),
        ("\n{% if %}", "line 2: Expected an expression, got 'end of statement block'"),
    ],
)
def test_a_fault_is_told_in_a_line(source, why):
    with pytest.raises(TemplateFault) as caught:
        rendered(source, messages=[])
    assert (str(caught.value), isinstance(caught.value, Overreach)) == (why, False)


def test_each_rendering_has_the_same_number_of_steps(monkeypatch):
    assert MAX_STEPS == 1_000_000
    monkeypatch.setattr(chat_sandbox, "MAX_STEPS", FEW_STEPS)
    environment = BoundedEnvironment(today=datetime.date.min)
    template = environment.compiled("{% for i in range(1_999) %}{% for j in range(9) %}{% endfor %}{% endfor %}done")
    assert [environment.run(template, {}) for _ in range(2)] == ["done", "done"]
