"""The grammar of prompt templates, the template that a prompt section stands for, and patterns that end."""

import re
import time

from hypothesis import given, strategies as st
from tests.messages import refused, says
from tests.properties import examples

from brim.config import load_config
from brim.config.prompts import Placeholder, Template, pattern_fault, prompt_columns, prompt_template
from brim.config.schema import Config
from brim.config.text import dump
from brim.errors import ConfigError, DataError

RANDOM = {"type": "random"}


def test_literals_placeholders_formats_and_escapes():
    template = Template.parse('Say "{a b}" for {price:.2f} EUR, as {{json}}: {__sample__}')
    names, price = template.names, Placeholder(name="price", format_spec=".2f")
    assert template.parts[:4] == ('Say "', Placeholder(name="a b"), '" for ', price)
    assert template.parts[4:] == (" EUR, as {json}: ", Placeholder(name="__sample__"))
    assert names == ("a b", "price", "__sample__")
    assert template.render({"a b": "x", "price": 3, "__sample__": "{y}"}) == 'Say "x" for 3.00 EUR, as {json}: {y}'
    for name in ["a", "Review Text", "größe", "x-1", "total (EUR)", "a/b", "0", "a_b", "_"]:
        assert Template.parse("{" + name + "}").parts == (Placeholder(name=name),)
    assert Template.parse("").parts == ()
    assert Template.parse("a {{}} b").parts == ("a {} b",)


NO_TEMPLATES = [
    "{x.__class__}", "{x[0]}", "{x!r}", "{}", '{"a": 1}', "{ a }", "{x:9999999f}", "{x:}", "a {b", "a } b",
    "{__task__:>9}", "{__dict__}",
]  # fmt: skip


def test_what_is_no_template_and_a_value_that_does_not_fit_its_format(refusals):
    refusals("templates.txt", Template.parse, [*NO_TEMPLATES, "{x:{y}}"])
    with refused("column x holds 'many', which the format {x:.2f} … a number", by=DataError):
        Template.parse("{x:.2f}").render({"x": "many"})


@given(st.text(alphabet="{}ab.[]!:_09f \"'\n", max_size=30))
def test_any_text_is_parsed_or_refused_and_reaches_into_nothing(template):
    try:
        parsed = Template.parse(template)
    except ConfigError:
        return
    assert isinstance(parsed.render(dict.fromkeys(parsed.names, 7)), str)
    assert not any(set(name) & set(".[]!{}:") for name in parsed.names)


@given(st.lists(st.sampled_from(["a", "b c", "{{", "}}", "x\n", "{a}", "{b c}", "{a:.1f}"]), max_size=10))
def test_rendering_agrees_with_str_format_where_both_are_safe(pieces):
    template = "".join(pieces)
    values = {"a": 1.25, "b c": "two {braces}"}
    assert Template.parse(template).render(values) == template.format(**values)


def config_of(**prompt):
    return Config.model_validate({"base_model": "m", "prompt": prompt})


def filled(values, **prompt):
    template = prompt_template(config_of(**prompt))
    assert template is not None
    return template.render(values)


def test_a_task_is_asked_in_ludwigs_words_and_a_given_template_goes_first():
    values = {"__sample__": "I am happy", "__context__": "[{'text': 'Oh no', 'label': 'sad'}]"}
    asked = "SAMPLE INPUT: I am happy\n\nUSER: Complete the following task: sentiment analysis\n\nASSISTANT:\n"
    assert filled(values, task="sentiment analysis") == asked
    assert filled(values, task="sentiment analysis", retrieval=RANDOM) == (
        "Below is relevant context:\n\n"
        "CONTEXT: [{'text': 'Oh no', 'label': 'sad'}]\n\n"
        "CONTEXT is comprised of labeled samples whose embeddings were similar to that of the sample input. The labels "
        "in\nthese samples could aid you in your final prediction. Given this and no prior knowledge, follow the "
        f"instructions\nbelow.\n\n{asked}"
    )
    task = "Say {q}, {__sample__} or {{}}"  # whose braces are its own
    assert filled({"q": "{x}"}, task=task, template="{__task__}: {q}") == f"{task}: {{x}}"


def test_a_template_with_its_task_stands_for_itself_and_nothing_for_none():
    config = config_of(task="Say {q}.", template="{__task__} {q:.2f} {{__task__}} {b}")
    assert str(prompt_template(config)) == "Say {{q}}. {q:.2f} {{__task__}} {b}"
    config = config_of(task="T", template="{__context__}{__task__}", retrieval=RANDOM)
    assert prompt_template(config) == Template((Placeholder(name="__context__"), "T"))
    assert prompt_template(config_of()) is None


def test_the_columns_that_a_prompt_reads():
    feature = {"name": "q", "type": "text", "column": "question"}
    for prompt, columns in [
        ({}, ("question",)),
        ({"task": "T"}, ("question",)),
        ({"task": "T", "retrieval": RANDOM}, ("question",)),
        ({"template": "{b} {__sample__} {a:.1f} {b} {question}"}, ("b", "question", "a")),
        ({"template": "{__task__} {__context__}", "task": "T", "retrieval": RANDOM}, ()),
    ]:
        config = Config.model_validate({"base_model": "m", "input_features": [feature], "prompt": prompt})
        assert prompt_columns(config) == columns


def tickets(**keys):
    return {
        "base_model": "m",
        "input_features": [{"name": name, "type": "text"} for name in ("Ticket-Nr.", "Betreff", "Beschreibung")],
        "output_features": [{"name": "Kategorie", "type": "category"}],
        "trainer": {"type": "finetune"},
        **keys,
    }


def test_several_inputs_are_named_in_a_line_each_and_load_back(tmp_path):
    loaded = load_config(tickets())
    template = "Ticket-Nr.: {Ticket-Nr.}\nBetreff: {Betreff}\nBeschreibung: {Beschreibung}\nKategorie:\n"
    assert loaded.config.prompt.template == template
    assert prompt_columns(loaded.config) == ("Ticket-Nr.", "Betreff", "Beschreibung")
    assert loaded.notes == ()
    dump(loaded.config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").config == loaded.config


def test_several_inputs_with_a_task_other_columns_and_braces_in_their_names():
    config = load_config(tickets(prompt={"task": "Sort {it}."})).config
    assert str(prompt_template(config)) == (
        "SAMPLE INPUT:\nTicket-Nr.: {Ticket-Nr.}\nBetreff: {Betreff}\nBeschreibung: {Beschreibung}\n\n"
        "USER: Complete the following task: Sort {{it}}.\n\nASSISTANT:\n"
    )
    features = [{"name": "{x}", "type": "text", "column": "a"}, {"name": "b", "type": "number"}]
    loaded = load_config(tickets(input_features=features))
    assert loaded.config.prompt.template == "{{x}}: {a}\nb: {b}\nKategorie:\n"
    (note,) = loaded.notes
    assert says(note, "input_features.1.type: the number b is read as text")
    (note,) = load_config(tickets(prompt={"template": "{Betreff} {Beschreibung} {Kunde}"})).notes
    assert says(note, "input_features.0: the model does not read Ticket-Nr., since prompt.template does not name")


def test_several_inputs_that_cannot_be_put_together(refusals):
    a, b, cut = {"name": "a", "type": "text"}, {"name": "b", "type": "text"}, {"max_sequence_length": 9}
    cases = [
        {"prompt": {"template": "{__sample__}{Betreff}"}},
        {"input_features": [a, {**b, "column": "b[0]"}]},
        {"input_features": [a, {**a, "column": "b"}]},
        {"input_features": [a, {**b, "preprocessing": cut}]},
    ]
    refusals("several_inputs.txt", lambda keys: load_config(tickets(**keys)), cases)


def test_labels_stand_in_the_prompt_as_they_are_and_a_text_has_none():
    labels = {"vocab": ["a {x}", "b"], "fallback_label": "c"}
    feature = {"name": "Kategorie", "type": "category", "preprocessing": labels}
    prompt = {"template": "One of {__labels__}: {Betreff}"}
    config = load_config(tickets(output_features=[feature], prompt=prompt)).config
    assert str(prompt_template(config)) == "One of a {{x}}, b, c: {Betreff}"
    text = [{"name": "Kategorie", "type": "text"}]
    with refused("prompt.template: … {__labels__}, … is a text … output_features.0.type: category"):
        load_config(tickets(output_features=text, prompt={"template": "{__labels__} {Betreff}"}))


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn)\.(?:(?:q_proj|k_proj|v_proj)))"
)
NESTED = "a repeat or a choice stands inside a repeat"
FOR_EVER = {
    **dict.fromkeys(["(a+)+$", "(.+)+Z", "(ab|ab)*c", "(a{1,3})*b", "((a?)?)*", "(?=(a+)+)b", "(a+){2,}", "(.*){3}Z"], NESTED),
    ".*" * 5 + "Z": "5 open repeats follow each other, which can take for ever; 4 may",
    "a?" * 20 + "b": "it has 1,048,576 ways to match, more than 10,000",
    "x" * 2001: "it has 2,001 characters, more than 2,000",
    "(": "it is not a regular expression: missing ), unterminated subpattern at position 0",
    "a{99999999999999}": "it is not a regular expression: the repetition number is too large",
}  # fmt: skip


def test_plain_patterns_are_taken_and_what_can_take_for_ever_is_refused():
    for pattern in ("q_proj|v_proj", r".*\.(q|v)_proj", r"(a)\1", "(a|b)*c", "", UNSLOTH):
        assert pattern_fault(pattern) is None, pattern
    for pattern, fault in FOR_EVER.items():
        assert (pattern_fault(pattern) or "").startswith(fault), pattern


@examples(150)
@given(st.text(alphabet="ab()|*+?.{},12\\", max_size=14))
def test_what_is_taken_ends(pattern):
    if pattern_fault(pattern) is None:
        started = time.process_time()
        re.fullmatch(pattern, "ab" * 8 + "c")
        re.fullmatch(pattern, "a" * 24 + "c")
        assert time.process_time() - started < 5
