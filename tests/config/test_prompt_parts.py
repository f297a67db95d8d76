"""The template that a prompt section stands for."""

import pytest

from brim.config import Config, PromptConfig
from brim.config.prompt_parts import prompt_columns, prompt_parts, template_text, template_with_task
from brim.config.template import Placeholder, render

RANDOM = {"type": "random"}


def filled(values, **prompt):
    parts = prompt_parts(PromptConfig.model_validate(prompt))
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
    prompt = PromptConfig.model_validate({"task": "Say {q}.", "template": "{__task__} {q:.2f} {{__task__}} {b}"})
    assert template_with_task(prompt) == "Say {{q}}. {q:.2f} {{__task__}} {b}"
    assert template_with_task(PromptConfig()) is None


def test_nothing_set_is_no_template():
    assert template_text(PromptConfig()) is None
    assert prompt_parts(PromptConfig()) is None


def test_the_task_is_a_literal_and_the_context_a_placeholder():
    prompt = PromptConfig.model_validate({"task": "T", "template": "{__context__}{__task__}", "retrieval": RANDOM})
    assert prompt_parts(prompt) == (Placeholder(name="__context__"), "T")


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
