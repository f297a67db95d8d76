"""Conversations as text, against transformers; and the assistant's part of it."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, strategies as st

from brim.data.chat import TemplateTexts
from brim.data.chat.messages import BadConversation, conversation_of
from brim.data.chat.render import ConversationRenderer
from brim.data.chat.sandbox import TemplateFault
from brim.data.chat.template import ChatTemplate

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


RENDERER = renderer("chatml")


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
    except (jinja2.TemplateError, TypeError) as error:  # what a template does not take, ours does not either
        with pytest.raises(TemplateFault, match=re.escape(str(error))):
            template(name).render(made.messages, made.tools, add_generation_prompt=answer)
    else:
        assert template(name).render(made.messages, made.tools, add_generation_prompt=answer) == theirs


def told(made):
    with pytest.raises(BadConversation) as caught:
        made()
    return caught.value.problem


@pytest.mark.parametrize(
    ("name", "which", "text"),
    [
        (
            "chatml",
            "two",
            "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n«4, “surely” <b><|im_end|>\n»"
            "<|im_start|>user\n And 3+3? <|im_end|>\n<|im_start|>assistant\n«6<|im_end|>\n»",
        ),
        (
            "headers",
            "calls",
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 31 Jan 2026\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nCall one of these:\n\n"
            + json.dumps(TOOL, indent=4)
            + "\n\nWhat is 2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            '«{"name": "add", "parameters": {"a": 2, "b": "ü"}}<|eom_id|>»'
            "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«6<|eot_id|>»",
        ),
        (
            "alternating",
            "system",
            "<s> [INST] Be brief.\n\nWhat is 2+2? [/INST]« 4, “surely” <b></s>» [INST]  And 3+3?  [/INST]« 6</s>»",
        ),
        (
            "folding",
            "system",
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is 2+2? [/INST]« 4, “surely” <b> </s>»"
            "<s>[INST] And 3+3? [/INST]« 6 </s>»",
        ),
        (
            "no_system",
            "two",
            "<s><start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\n«4, “surely” <b><end_of_turn>\n»"
            "<start_of_turn>user\nAnd 3+3?<end_of_turn>\n<start_of_turn>model\n«6<end_of_turn>\n»",
        ),
        (
            "thinking",
            "thinks",
            "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
            "«<think>\nTwo and two\n</think>\n\n4, “surely” <b><|im_end|>\n»",
        ),
        (
            "marked",
            "one",
            "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n«4, “surely” <b><|im_end|>\n»",
        ),
    ],
)
def test_the_assistants_turns_are_learned_with_their_end(name, which, text):
    assert pieces(renderer(name).learned(conversation(which))) == text


def test_the_last_turn_can_be_learned_where_earlier_ones_are_written_otherwise():
    two = conversation("two")
    problem = told(lambda: renderer("thinking").learned(two))
    assert problem.what == (
        "the template writes turns 1 to 2 otherwise alone than in the whole conversation, so that what the assistant "
        r"says cannot be told apart: 'im_start|>assistant\n<think>\n\n</think>\n\n4' alone, "
        r"'im_start|>assistant\n4, “surely” <b><|im_' in the whole"
    )
    assert problem.fix == (
        "set chat.supervise: last, which learns the last turn alone, or name another template with chat.template"
    )
    assert pieces(renderer("thinking", "last").learned(two)).endswith(
        "4, “surely” <b><|im_end|>\n<|im_start|>user\n And 3+3? <|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\n6<|im_end|>\n»"
    )


def test_several_answers_of_tools_in_one_turn_are_no_merge():
    text = pieces(renderer("thinking", "last").learned(conversation("results")))
    assert "</tool_response>\n<tool_response>" in text
    assert text.count("«") == 1


@pytest.mark.parametrize(
    ("name", "turns", "what"),
    [
        ("marked", [SYSTEM, USER, ANSWER], "the chat template marked.jinja drops turn 1 (system)"),
        ("marked", [USER, {**CALL, "content": "x"}, RESULT, ANSWER], "the chat template marked.jinja drops a tool call of turn 2"),
        ("no_system", [SYSTEM, USER, ANSWER], "the chat template no_system.jinja refuses the conversation: System role not supported"),
        ("alternating", [USER, USER, ANSWER], "the chat template alternating.jinja refuses the conversation: After the optional system message, conversation roles must alternate user/assistant"),
        ("chatml", [USER, CALL, RESULT, ANSWER], "the chat template chatml.jinja does not write the tool calls of turn 2 (assistant)"),
        ("{% for m in messages %}{{ m.content + m.tool_calls|tojson if m.tool_calls else m.content }}{% endfor %}", [USER, CALL, RESULT, ANSWER],
         "the chat template {% for m in messages %}{{ m.content + m.tool_calls|tojson if m.tool_calls else m.content }}{% endfor %}.jinja asks for the content of turn 2 (assistant), which calls a tool and has none"),
        ("{{ messages[0].foo.bar }}", [USER, ANSWER], "the chat template {{ messages[0].foo.bar }}.jinja cannot write the conversation: 'dict object' has no attribute 'foo'"),
        ("headers", [ANSWER, USER, SECOND], "the chat template headers.jinja cannot write the beginning of the assistant's turn without a turn before it: list object has no element 0"),
    ],
)  # fmt: skip
def test_turns_that_do_not_reach_the_text_are_told(name, turns, what):
    problem = told(lambda: renderer(name).learned(conversation_of(json.dumps(turns))))
    assert problem.what == what
    assert "chat.template" in problem.fix


def test_tools_and_contents_that_are_dropped_are_told():
    problem = told(lambda: renderer("marked").learned(conversation_of([USER, ANSWER], [TOOL])))
    assert problem.what == "the chat template marked.jinja drops tool 1"
    turns = [USER, {**CALL, "content": "I call"}, RESULT, SECOND]
    problem = told(lambda: renderer("headers").learned(conversation_of(turns, [TOOL])))
    assert problem.what == "the chat template headers.jinja drops turn 2 (assistant)"
    assert problem.fix == "remove it from the conversation, or name another template with chat.template"


MERGING = (
    "{% for m in messages %}{% if loop.first or m.role != messages[loop.index0 - 1].role %}<{{ m.role }}>{% endif %}"
    "{{ m.content }}{% if loop.last or m.role != messages[loop.index0 + 1].role %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_turns_that_are_merged_are_told():
    problem = told(lambda: renderer(MERGING, "last").learned(conversation_of([SYSTEM, USER, AGAIN, ANSWER])))
    assert problem.what.endswith("merges the turns 2 and 3 (user, user) into one")
    assert problem.expected == "a turn of its own for each"
    for supervise in ("all", "last"):
        merged = conversation_of([USER, ANSWER, SECOND, AGAIN, ANSWER])
        problem = told(lambda: renderer(MERGING, supervise).learned(merged))  # noqa: B023 (called at once)
        assert problem.what.endswith("merges the turns 2 and 3 (assistant, assistant) into one")
    for name in ("chatml", "headers", "thinking", "no_system", "folding"):
        renderer(name, "last").learned(conversation_of([USER, ANSWER, SECOND, AGAIN, USER, ANSWER]))
    assert pieces(renderer(MERGING).learned(conversation_of([USER, ANSWER]))) == (
        "<user>What is 2+2?</s><assistant>«4, “surely” <b></s>»"
    )


def test_turns_are_merged_even_where_a_template_reads_what_they_say():
    picky = "{% for m in messages %}{% if 'qz' in m.content %}{{ raise_exception('?') }}{% endif %}{% endfor %}"
    problem = told(lambda: renderer(picky + MERGING, "last").learned(conversation_of([USER, AGAIN, ANSWER])))
    assert problem.what.endswith("merges the turns 1 and 2 (user, user) into one")


def test_a_turn_with_a_weight_is_not_learned_as_any_other():
    weighed = conversation_of([USER, {**ANSWER, "weight": 0}, AGAIN, {**SECOND, "weight": 1.0}])
    problem = told(lambda: renderer("chatml").learned(weighed))
    assert problem.what == "turn 2 (assistant) has the weight 0, and brim would learn it as any other"
    assert problem.fix.startswith("set chat.supervise: last")
    assert pieces(renderer("chatml", "last").learned(weighed)).endswith("«6<|im_end|>\n»")
    last = conversation_of([USER, {**ANSWER, "weight": 0.5}])
    assert "end the conversation before the turn" in told(lambda: renderer("chatml", "last").learned(last)).fix
    renderer("chatml").prompt(weighed)


def test_thoughts_that_are_dropped_are_counted():
    for name, num_dropped in [("chatml", 2), ("thinking", 0)]:
        made = renderer(name, "last")
        for turns in (
            [USER, THOUGHT],
            [USER, THOUGHT],
            [USER, {**ANSWER, "thinking": ""}],
            [USER, THOUGHT, USER, ANSWER],
        ):
            made.learned(conversation_of(turns))
        assert made.num_without_thoughts == num_dropped


def test_what_a_prediction_goes_on_from_is_what_was_learned_from():
    for name in ("chatml", "headers", "alternating", "no_system", "folding"):
        learned = renderer(name).learned(conversation("two"))
        assert tuple(piece.text for piece in renderer(name).prompt(conversation("two"))) == tuple(
            piece.text for piece in learned[:-1]
        )


def test_what_follows_an_answer_in_a_prompt_is_no_part_of_it():
    made = renderer("chatml").prompt(conversation_of([USER, ANSWER, SECOND]))
    assert [piece.text for piece in made][1:] == ["4, “surely” <b><|im_end|>\n", "<|im_start|>assistant\n"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(lambda text: f"x{text}x")


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.none() | TEXT)
def test_whatever_is_said_what_is_learned_is_the_answers(exchanges, system):
    turns = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in exchanges:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    made = RENDERER.learned(conversation_of(json.dumps(turns)))
    ends = [piece.text for piece in made if piece.supervised]
    assert ends == [f"{answer}<|im_end|>\n" for _, answer in exchanges]
    text = template("chatml").render(turns, None, add_generation_prompt=False)
    assert "".join(piece.text for piece in made) == text


def test_a_prompt_is_whole_where_no_row_like_it_could_be_learned():
    (piece,) = renderer("thinking").prompt(conversation("two"))
    (last,) = renderer("thinking", "last").prompt(conversation("two"))
    assert piece == last
    assert piece.text.endswith(" And 3+3? <|im_end|>\n<|im_start|>assistant\n")


def test_a_prompt_that_loses_a_turn_is_told():
    assert "drops turn 1 (system)" in told(lambda: renderer("marked").prompt(conversation("system"))).what


def test_a_generation_prompt_that_no_answer_begins_with_is_told():
    opened = TEMPLATES["chatml"].replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")
    problem = told(lambda: renderer(opened).learned(conversation("one")))
    assert "turn 1 with the beginning of the next answer otherwise alone than in the whole" in problem.what


def test_half_of_a_character_is_told():
    cell = '[{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "a"}]'
    assert "half of a character" in told(lambda: renderer("chatml").learned(conversation_of(cell))).what
