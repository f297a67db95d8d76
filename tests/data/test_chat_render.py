"""Conversations as text, against transformers; and the assistant's part of it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from brim.data.chat_messages import conversation_of
from brim.data.chat_render import ConversationRenderer
from brim.data.chat_template import ChatTemplate, TemplateTexts

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
TODAY = datetime.date(2026, 1, 31)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

USER, ANSWER = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4, “surely” <b>"}
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN, SECOND = {"role": "user", "content": " And 3+3? "}, {"role": "assistant", "content": "6"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "ü"}'}}],
}
RESULT, OTHER_RESULT = {"role": "tool", "content": "4", "name": "add"}, {"role": "tool", "content": "5", "name": "add"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <two>", "parameters": {"type": "object", "properties": {}}},
}
THOUGHT = {**ANSWER, "reasoning_content": "Two and two"}

CONVERSATIONS = {
    "one": [USER, ANSWER],
    "two": [USER, ANSWER, AGAIN, SECOND],
    "system": [SYSTEM, USER, ANSWER, AGAIN, SECOND],
    "calls": [SYSTEM, USER, CALL, RESULT, SECOND],
    "results": [USER, CALL, RESULT, OTHER_RESULT, SECOND],
    "thinks": [USER, THOUGHT],
}
WITH_TOOLS = ("calls", "results")


def template(name, **changes):
    texts = TemplateTexts(default=TEMPLATES.get(name, name), tool_use=None, where=f"{name}.jinja")
    return ChatTemplate(texts, special_tokens=SPECIAL, today=TODAY, **changes)


def renderer(name, supervise="all"):
    return ConversationRenderer(template=template(name), supervise=supervise)


def conversation(name):
    return conversation_of(json.dumps(CONVERSATIONS[name]), json.dumps([TOOL] if name in WITH_TOOLS else None))


def pieces(made):
    """The text with what is learned in «»."""
    return "".join(f"«{piece.text}»" if piece.supervised else piece.text for piece in made)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


@pytest.fixture
def same_day(monkeypatch):
    from transformers.utils import chat_template_utils

    class Clock(datetime.datetime):
        @classmethod
        def now(cls):
            return cls(2026, 1, 31, 12, 30)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize("answer", [False, True])
@pytest.mark.parametrize("which", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(tokenizer, same_day, name, which, answer):
    made = conversation(which)
    messages = json.loads(json.dumps(CONVERSATIONS[which]))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = [TOOL] if which in WITH_TOOLS else None
    try:
        theirs = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=answer, tokenize=False
        )
    except Exception:
        with pytest.raises(Exception, match=r"."):
            template(name).render(made.messages, made.tools, add_generation_prompt=answer)
        return
    assert template(name).render(made.messages, made.tools, add_generation_prompt=answer) == theirs
