"""`chat`: what may stand beside it, and that it comes back from a file."""

from __future__ import annotations

import datetime

import pytest

from brim.config import DeviceFacts, dump, load_config, resolve
from brim.config.schema import ChatConfig, Config


def chat(value, **keys):
    return {"base_model": "model", "chat": value, **keys}


@pytest.mark.parametrize(
    "value", [{}, {"supervise": "last", "tools": "t", "template": "/a/b.jinja", "date": "2026-01-31"}]
)
def test_it_comes_back_from_its_file(tmp_path, value):
    config = resolve(load_config(chat(value)).config, DeviceFacts(kind="cpu", bf16=False)).config
    text = dump(config, tmp_path / "config.yaml")
    assert "features" not in text
    loaded = load_config(tmp_path / "config.yaml")
    assert (loaded.config, loaded.notes) == (config, ())
    assert loaded.config.chat == ChatConfig.model_validate(value)
    assert Config.model_validate(config.model_dump(exclude_unset=True)) == config


def test_it_is_off_by_default_and_an_override_turns_it_on():
    assert load_config({"base_model": "model"}).config.chat is None
    assert load_config({"base_model": "model"}, ["chat={}"]).config.chat == ChatConfig()
    assert load_config({"base_model": "model"}, ["chat.supervise=last"]).config.chat == ChatConfig(supervise="last")


def test_there_is_no_short_form(problems):
    (told,) = problems(chat("messages"))
    expected = "{} for all defaults, a mapping such as {messages: COLUMN}, or null"
    assert told == f"chat: chat is 'messages'\n  expected: {expected}"


def test_the_answer_is_called_the_assistants():
    assert load_config(chat({})).config.answer_name == "assistant"
    assert load_config(chat(None)).config.answer_name == "completion"


def test_keys_of_prompts_and_answers_may_not_stand_beside_it(problems):
    features = {"input_features": [{"name": "q", "type": "text"}], "output_features": [{"name": "a", "type": "text"}]}
    told = problems(chat({}, **features, prompt={"template": "{q}"}))
    assert [problem.split(" has no effect")[0] for problem in told] == [
        "input_features: input_features",
        "output_features: output_features",
        "prompt.template: prompt.template",
    ]
    assert told[0] == (
        "input_features: input_features has no effect on conversations, and chat is given\n"
        "  expected: chat, or features and a prompt template\n"
        "  fix: remove input_features (the columns are chat.messages and chat.tools), or remove chat"
    )
    load_config(chat({}, prompt={"template": None}))
    load_config(chat(None, **features))


def test_a_day_is_a_date_with_or_without_quotes(file, problems):
    assert load_config(file("base_model: m\nchat: {date: 2026-01-31}\n")).config.chat.date == "2026-01-31"
    assert load_config(file("base_model: m\nchat: {date: '2026-01-31'}\n")).config.chat.date == "2026-01-31"
    assert ChatConfig(date=datetime.date(2026, 1, 31)).date == "2026-01-31"
    for day in ("2026-02-30", "31.01.2026", "20260131", "today"):
        (told,) = problems(chat({"date": day}))
        assert told == f"chat.date: chat.date is '{day}'\n  expected: a day such as 2026-01-31, or null"
