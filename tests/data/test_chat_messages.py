"""Cells as conversations, and everything that is none."""

import json

import pyarrow as pa
import pytest

from brim.data.chat.messages import BadConversation, conversation_of, require_learnable, to_be_continued

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ROLES = "one of system, developer, user, assistant, tool, function, ipython"


def told(cell, tools=None, check=lambda conversation: None):
    with pytest.raises(BadConversation) as caught:
        check(conversation_of(cell, tools))
    problem = caught.value.problem
    assert problem.where == ""
    return problem.what, problem.expected, problem.fix


def test_json_text_and_arrow_lists_are_the_same_conversation():
    turns = [{"role": "system", "content": "s"}, USER, {**ANSWER, "name": "x"}]
    column = pa.array([turns])
    assert column.type == pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.string()}))
    arrow = conversation_of(column.to_pylist()[0])
    assert arrow == conversation_of(json.dumps(turns))
    assert arrow.messages == turns
    assert arrow.tools is None


def test_nulls_that_structs_fill_in_are_dropped_and_those_of_json_kept_in_arguments():
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert conversation_of(turns).messages[1] == {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert conversation_of(json.dumps(turns)).messages[1]["tool_calls"] == calls


def test_arguments_that_are_json_text_become_mappings():
    turns = [
        USER,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, {"y": "ü"}]}'}},
                {"name": "g", "arguments": ""},
            ],
        },
    ]
    assert conversation_of(turns).messages[1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, {"y": "ü"}]}}},
        {"name": "g", "arguments": {}},
    ]


def test_the_texts_of_several_parts_are_joined():
    parts = [{"type": "text", "text": "one, "}, {"text": "two"}, "!"]
    assert conversation_of([{"role": "user", "content": parts}, ANSWER]).messages[0]["content"] == "one, two!"


def test_share_gpt_is_read_as_roles():
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q", "weight": 1},
        {"from": "gpt", "value": "a"},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "b"},
    ]
    made = conversation_of(turns)
    assert made.was_share_gpt
    assert [(turn["role"], turn["content"]) for turn in made.messages] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "a"),
        ("tool", "r"),
        ("assistant", "b"),
    ]
    assert made.messages[1]["weight"] == 1


def test_thoughts_stand_under_the_names_that_templates_read():
    assert conversation_of([USER, {**ANSWER, "reasoning": "r"}]).messages[1] == {
        **ANSWER,
        "reasoning": "r",
        "thinking": "r",
        "reasoning_content": "r",
    }


@pytest.mark.parametrize("nothing", [None, "", " ", "null", "[]", []])
def test_a_cell_without_tools_is_none(nothing):
    assert conversation_of([USER, ANSWER], nothing).tools is None


def test_tools_are_json_schemas():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": None}}}
    assert conversation_of([USER, ANSWER], json.dumps([tool])).tools == [tool]
    del tool["function"]["parameters"]["required"]
    assert conversation_of([USER, ANSWER], [tool]).tools == [tool]
    assert told([USER, ANSWER], [{"type": "function"}])[0] == "tool 1 has no name"
    assert told([USER, ANSWER], "f")[0].startswith("the list of tools is a text that is no JSON (")
    assert told([USER, ANSWER], '{"name": "f"}')[0] == "the list of tools is an object"


A_LIST = 'a list of turns such as {"role": "user", "content": "…"}'


@pytest.mark.parametrize(
    ("cell", "what", "expected", "fix"),
    [
        (None, "the conversation is missing", A_LIST, ""),
        ("hello", "the conversation is a text that is no JSON (Expecting value: line 1 column 1 (char 0))", A_LIST, ""),
        ('[{"role": "user", "role": "user"}]', "the conversation is a text that is no JSON (the key 'role' stands twice in one object)", A_LIST, ""),
        ("3", "the conversation is a number", A_LIST, ""),
        ('{"messages": []}', "the conversation is an object", A_LIST, ""),
        ("null", "the conversation is null", A_LIST, ""),
        (True, "the conversation is true or false", A_LIST, ""),
        ("[]", "the conversation is empty", "at least one turn", ""),
        ([{"role": "user", "content": "x" * 5_000_000}], "the conversation is longer than 4,194,304 characters", "", ""),
        ([USER, "a"], "turn 2 is text", "an object with role and content", ""),
        ([{"content": "q"}], "turn 1 has no role", ROLES, ""),
        ([{"role": None, "content": "q"}], "turn 1 has no role", ROLES, ""),
        ([{"role": 1, "content": "q"}], "turn 1 has a role that is a number", ROLES, ""),
        ([USER, {"role": "asistant", "content": "a"}], "turn 2 has the role 'asistant'", ROLES, "write assistant"),
        ([{"role": "User", "content": "a"}], "turn 1 has the role 'User'", ROLES, "write user"),
        ([{"role": "gpt", "content": "a"}], "turn 1 has the role 'gpt'", ROLES, "write assistant"),
        ([{"role": "narrator", "content": "a"}], "turn 1 has the role 'narrator'", ROLES, ""),
        ([{"role": "user"}], "turn 1 (user) has no content", "content as text; only an assistant's turn with tool_calls goes without", ""),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "turn 2 (assistant) has no content", "content as text; only an assistant's turn with tool_calls goes without", ""),
        ([{"role": "user", "content": 3}], "the content of turn 1 is a number", "text, or a list of texts", ""),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "the content of turn 1 holds a part of the type 'image'", "parts of the type text", ""),
        ([USER, {**ANSWER, "reasoning": {"steps": 2}}], "the reasoning of turn 2 is an object", "text", ""),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of the content of turn 1 is an object without text", '{"type": "text", "text": "…"}', ""),
        ([{**USER, "tool_calls": [{"name": "f"}]}], "turn 1 calls a tool and is of the role user", "the role assistant", ""),
        ([USER, {**ANSWER, "tool_calls": {"name": "f"}}], "the tool_calls of turn 2 is an object", 'a list such as [{"type": "function", "function": {"name": "…", "arguments": {…}}}]', ""),
        ([USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{x"}]}], "the tool_calls of turn 2: the arguments of f are no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))", "", ""),
        ([USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "the tool_calls of turn 2: the arguments of f are a list", "an object of names and values", ""),
        ([{"from": "human", "value": "q"}, ANSWER], "turn 2 is written otherwise than those with `from` and `value`", "one form in a conversation: role and content in all turns, or from and value", ""),
        ([{"from": "function_call", "value": "q"}], "turn 1 is from 'function_call'", "one of human, gpt, bot, model, ai, chatgpt, user, assistant, system, tool, observation", "rewrite the turn with role and content (and tool_calls where the assistant calls a tool)"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_told_with_the_turn(cell, what, expected, fix):
    assert told(cell) == (what, expected, fix)


def test_there_must_be_something_to_learn_at_the_end():
    assert told([USER], check=require_learnable)[0] == "no turn is the assistant's, so there is nothing to learn"
    assert told([ANSWER], check=require_learnable)[0] == "nothing stands before the assistant's turn"
    assert told([USER, ANSWER, USER], check=require_learnable) == (
        "the last turn, 3, is of the role user, and nothing is learned from it",
        "a conversation that ends with the assistant's turn",
        "add the assistant's answer, or remove the turn",
    )


def test_the_answer_that_is_there_is_not_part_of_the_prompt():
    assert to_be_continued(conversation_of([USER, ANSWER])).messages == [USER]
    assert to_be_continued(conversation_of([USER, ANSWER, USER])).messages == [USER, ANSWER, USER]
    assert told([ANSWER], check=to_be_continued)[0] == "nothing stands before the assistant's turn"
