"""What a prompt's keys ask of each other."""

import pytest

from brim.config import load_config

SEMANTIC = {"type": "semantic", "k": 2, "model_name": "folder"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            {"task": "Classify.", "template": "{question}"},
            "prompt.template: prompt.task is set, and prompt.template does not say where it goes\n"
            "  expected: {__task__} in the template\n"
            "  fix: put {__task__} into the template, or remove prompt.task",
        ),
        (
            {"template": "{__task__} {question}"},
            "prompt.template: prompt.template has {__task__}, and prompt.task is not set\n"
            "  fix: set prompt.task, or take {__task__} out of the template",
        ),
        (
            {"template": "{question}", "retrieval": {"type": "random"}},
            "prompt.template: prompt.retrieval is set, and prompt.template does not say where it goes\n"
            "  expected: {__context__} in the template\n"
            "  fix: put {__context__} into the template, or remove prompt.retrieval",
        ),
        (
            {"template": "{__context__} {question}", "retrieval": {"type": None, "k": 0}},
            "prompt.template: prompt.template has {__context__}, and prompt.retrieval is not set\n"
            "  fix: set prompt.retrieval, such as {type: random, k: 2}, or take {__context__} out of the template",
        ),
        (
            {"template": "Guess {__context__}", "retrieval": {"type": "random"}},
            "prompt.template: prompt.retrieval is set, and prompt.template names no column: nothing tells one row from "
            "another\n  expected: a column's name in braces, or {__sample__}",
        ),
        (
            {"task": "Classify.", "retrieval": {"k": 2}},
            "prompt.retrieval.k: prompt.retrieval.k has no effect without prompt.retrieval.type\n"
            "  fix: set prompt.retrieval.type to random or semantic, or remove k",
        ),
        (
            {"task": "Classify.", "retrieval": {"model_name": "x"}},
            "prompt.retrieval.model_name: prompt.retrieval.model_name has no effect without prompt.retrieval.type\n"
            "  fix: set prompt.retrieval.type to random or semantic, or remove model_name",
        ),
        (
            {"retrieval": {"type": "random"}},
            "prompt.retrieval: prompt.retrieval is set, and there is neither a prompt.task nor a prompt.template\n"
            "  expected: a task (for the built-in template), or a template with {__context__}\n"
            '  fix: add prompt.task, such as "Classify the input"',
        ),
        (
            {"task": "Classify.", "retrieval": {"type": "semantic"}},
            "prompt.retrieval.type: prompt.retrieval.type is semantic, and there is no model that compares inputs\n"
            "  expected: prompt.retrieval.model_name: a sentence-transformers model, as a folder or a Hub id\n"
            "  fix: add model_name, or set prompt.retrieval.type: random",
        ),
        (
            {"task": "Classify.", "retrieval": {"type": "random", "model_name": "x"}},
            "prompt.retrieval.model_name: prompt.retrieval.model_name has no effect on rows that are drawn by chance\n"
            "  fix: remove model_name, or set prompt.retrieval.type: semantic",
        ),
        (
            {"task": "Classify.", "template": "{__task__} {__context__} {answer}", "retrieval": SEMANTIC},
            "prompt.template: prompt.template names the output column answer: the prompt would give the answer away\n"
            "  fix: take {answer} out of the template",
        ),
        (
            {"task": "Classify.", "retrieval": {"type": "nearest"}},
            "prompt.retrieval.type: prompt.retrieval.type is 'nearest'\n  expected: random, semantic or null",
        ),
        (
            {"task": "Classify.", "retrieval": {**SEMANTIC, "index_name": "../mine"}},
            "prompt.retrieval.index_name: prompt.retrieval.index_name is '../mine'\n"
            "  expected: a name of letters, digits, dots, dashes and underscores, or null",
        ),
    ],
)
def test_what_is_refused(minimal, problems, prompt, message):
    features = {"input_features": [{"name": "question", "type": "text"}]}
    assert problems(minimal(**features, prompt=prompt)) == [message]


@pytest.mark.parametrize(
    "prompt",
    [
        {"task": "Classify."},
        {"task": "Classify.", "retrieval": None},
        {"task": "Classify.", "retrieval": {"type": None, "k": 0, "model_name": None, "index_name": None}},
        {"task": "Classify.", "retrieval": {"type": "random"}},
        {"task": "Classify.", "retrieval": SEMANTIC},
        {"task": "Classify.", "template": "{__task__} {__context__} {__sample__}", "retrieval": SEMANTIC},
        {"template": "{__context__} {a column}", "retrieval": {"type": "random", "k": 3}},
    ],
)
def test_what_is_accepted(minimal, prompt):
    read = load_config(minimal(prompt=prompt)).config.prompt
    assert (read.task, read.template) == (prompt.get("task"), prompt.get("template"))


def test_a_type_without_a_number_asks_for_one_example(minimal):
    def number(**retrieval):
        return load_config(minimal(prompt={"task": "Classify.", "retrieval": retrieval})).config.prompt.num_examples

    assert (number(), number(type="random"), number(type="random", k=0), number(type="random", k=4)) == (0, 1, 1, 4)


def test_conversations_have_no_task_and_no_examples(problems):
    told = problems({"base_model": "m", "chat": {}, "prompt": {"task": "x", "retrieval": {"type": "random"}}})
    assert [problem.split(",")[0] for problem in told] == [
        "prompt.task: prompt.task has no effect on conversations",
        "prompt.retrieval: prompt.retrieval has no effect on conversations",
    ]
