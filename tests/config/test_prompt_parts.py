"""The template that a prompt section stands for."""

import pytest

from brim.config import dump, load_config, prompt_columns, prompt_parts, render, template_text, template_with_task
from brim.config.schema import Config, PromptConfig
from brim.config.template import Placeholder

RANDOM = {"type": "random"}


def config_of(**prompt):
    return Config.model_validate({"base_model": "m", "prompt": prompt})


def filled(values, **prompt):
    parts = prompt_parts(config_of(**prompt))
    assert parts is not None
    return render(parts, values)


def test_only_a_task_is_asked_in_ludwigs_words():
    assert filled({"__sample__": "I am happy"}, task="sentiment analysis") == (
        "SAMPLE INPUT: I am happy\n\nUSER: Complete the following task: sentiment analysis\n\nASSISTANT:\n"
    )


def test_a_task_with_examples_is_asked_in_ludwigs_words():
    values = {"__sample__": "I am happy", "__context__": "[{'text': 'Oh no', 'label': 'sad'}]"}
    assert filled(values, task="sentiment analysis", retrieval=RANDOM) == (
        "Below is relevant context:\n\n"
        "CONTEXT: [{'text': 'Oh no', 'label': 'sad'}]\n\n"
        "CONTEXT is comprised of labeled samples whose embeddings were similar to that of the sample input. The labels "
        "in\nthese samples could aid you in your final prediction. Given this and no prior knowledge, follow the "
        "instructions\nbelow.\n\n"
        "SAMPLE INPUT: I am happy\n\n"
        "USER: Complete the following task: sentiment analysis\n\n"
        "ASSISTANT:\n"
    )


def test_a_given_template_goes_first_and_braces_of_the_task_are_its_own():
    assert filled({"q": "{x}"}, task="Say {q}, {__sample__} or {{}}", template="{__task__}: {q}") == (
        "Say {q}, {__sample__} or {{}}: {x}"
    )


def test_a_template_with_its_task_stands_for_itself():
    config = config_of(task="Say {q}.", template="{__task__} {q:.2f} {{__task__}} {b}")
    assert template_with_task(config) == "Say {{q}}. {q:.2f} {{__task__}} {b}"
    assert template_with_task(config_of()) is None


def test_nothing_set_is_no_template():
    assert template_text(PromptConfig()) is None
    assert prompt_parts(config_of()) is None


def test_the_task_is_a_literal_and_the_context_a_placeholder():
    config = config_of(task="T", template="{__context__}{__task__}", retrieval=RANDOM)
    assert prompt_parts(config) == (Placeholder(name="__context__"), "T")


@pytest.mark.parametrize(
    ("prompt", "columns"),
    [
        ({}, ("question",)),
        ({"task": "T"}, ("question",)),
        ({"task": "T", "retrieval": RANDOM}, ("question",)),
        ({"template": "{b} {__sample__} {a:.1f} {b} {question}"}, ("b", "question", "a")),
        ({"template": "{__task__} {__context__}", "task": "T", "retrieval": RANDOM}, ()),
    ],
)
def test_the_columns_that_a_prompt_reads(prompt, columns):
    feature = {"name": "q", "type": "text", "column": "question"}
    assert prompt_columns(
        Config.model_validate({"base_model": "m", "input_features": [feature], "prompt": prompt})
    ) == (columns)


# Several inputs


def tickets(**keys):
    return {
        "base_model": "m",
        "input_features": [{"name": name, "type": "text"} for name in ("Ticket-Nr.", "Betreff", "Beschreibung")],
        "output_features": [{"name": "Kategorie", "type": "category"}],
        "trainer": {"type": "finetune"},
        **keys,
    }


def test_several_inputs_are_named_in_a_line_each():
    loaded = load_config(tickets())
    assert loaded.config.prompt.template == (
        "Ticket-Nr.: {Ticket-Nr.}\nBetreff: {Betreff}\nBeschreibung: {Beschreibung}\nKategorie:\n"
    )
    assert prompt_columns(loaded.config) == ("Ticket-Nr.", "Betreff", "Beschreibung")
    assert loaded.notes == ()


def test_several_inputs_with_a_task_stand_in_its_template():
    config = load_config(tickets(prompt={"task": "Sort {it}."})).config
    assert template_with_task(config) == (
        "SAMPLE INPUT:\nTicket-Nr.: {Ticket-Nr.}\nBetreff: {Betreff}\nBeschreibung: {Beschreibung}\n\n"
        "USER: Complete the following task: Sort {{it}}.\n\nASSISTANT:\n"
    )


def test_inputs_that_are_put_together_load_back(tmp_path):
    config = load_config(tickets()).config
    dump(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").config == config


def test_a_feature_may_have_another_column_and_a_name_with_braces():
    features = [{"name": "{x}", "type": "text", "column": "a"}, {"name": "b", "type": "number"}]
    loaded = load_config(tickets(input_features=features))
    assert loaded.config.prompt.template == "{{x}}: {a}\nb: {b}\nKategorie:\n"
    assert loaded.notes == ("input_features.1.type: the number b is read as text, as it stands in the data",)


def test_an_input_that_the_template_leaves_out_is_noted():
    loaded = load_config(tickets(prompt={"template": "{Betreff} {Beschreibung} {Kunde}"}))
    assert loaded.notes == (
        "input_features.0: the model does not read Ticket-Nr., since prompt.template does not name its column",
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"prompt": {"template": "{__sample__}{Betreff}"}},
            "prompt.template: prompt.template has {__sample__}, and there are several input features\n"
            "  expected: the columns by their names\n  fix: write {Ticket-Nr.} {Betreff} {Beschreibung} in its place",
        ),
        (
            {"input_features": [{"name": "a", "type": "text"}, {"name": "b", "type": "text", "column": "b[0]"}]},
            "input_features.1.column: the column 'b[0]' cannot stand in a template, and there are several inputs\n"
            "  expected: a name without brackets, braces, quotes, backslashes, dots, colons and exclamation marks\n"
            "  fix: rename the column in the data",
        ),
        (
            {"input_features": [{"name": "a", "type": "text"}, {"name": "a", "type": "text", "column": "b"}]},
            "input_features.1.name: two input features are called a\n  expected: a name of its own for each",
        ),
        (
            {
                "input_features": [
                    {"name": "a", "type": "text"},
                    {"name": "b", "type": "text", "preprocessing": {"max_sequence_length": 9}},
                ]
            },
            "input_features.1.preprocessing.max_sequence_length: max_sequence_length of an input feature cuts the "
            "prompt, which is made of several here\n"
            "  fix: set preprocessing.global_max_sequence_length, or remove it",
        ),
    ],
)
def test_several_inputs_that_cannot_be_put_together(problems, keys, message):
    assert problems(tickets(**keys)) == [message]


# Labels


def test_the_labels_stand_in_the_prompt_as_they_are():
    feature = {
        "name": "Kategorie",
        "type": "category",
        "preprocessing": {"vocab": ["a {x}", "b"], "fallback_label": "c"},
    }
    config = load_config(
        tickets(output_features=[feature], prompt={"template": "One of {__labels__}: {Betreff}"})
    ).config
    assert template_with_task(config) == "One of a {{x}}, b, c: {Betreff}"


def test_a_text_has_no_labels_for_the_prompt(problems):
    text = [{"name": "Kategorie", "type": "text"}]
    assert problems(tickets(output_features=text, prompt={"template": "{__labels__} {Betreff}"})) == [
        "prompt.template: prompt.template has {__labels__}, and the output feature is a text, which has none\n"
        "  fix: set output_features.0.type: category, or take {__labels__} out of the template"
    ]
