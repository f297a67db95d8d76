"""Read a cell as a conversation: check its turns and bring them into the form that chat templates read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim.data.read import DECODER, kind_of
from brim.errors import Problem

ASSISTANT = "assistant"


BEGINNINGS = ("system", "developer")  # roles that may be folded into the turn after them


TOOLS = ("tool", "function", "ipython")  # roles of what a tool answered


ROLES = (*BEGINNINGS, "user", ASSISTANT, *TOOLS)


_MEANT = {"human": "user", **dict.fromkeys(("gpt", "bot", "model", "ai", "chatgpt"), ASSISTANT)}


_SHARE_GPT = {**_MEANT, **{role: role for role in ("user", ASSISTANT, "system", "tool")}, "observation": "tool"}


_MAX_CHARACTERS = 1 << 22


REASONING = ("reasoning_content", "thinking", "reasoning")


Turn = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Hold turns with `role` and `content`, and the tools; all are plain JSON values."""

    messages: list[Turn]
    tools: list[Turn] | None  # None where there is none to call
    was_share_gpt: bool = False  # written with `from` and `value`


class BadConversation(Exception):
    """Say what is wrong with one row's conversation; the caller adds the place."""

    def __init__(self, what: str, *, expected: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.problem = Problem(what=what, expected=expected, fix=fix)


def conversation_of(cell: Any, tools: Any = None) -> Conversation:
    """Read a row's cells as a conversation: JSON text, or Arrow's lists of structs as Python holds them.

    Keys without a value are dropped, since structs fill absent keys with nulls, and templates write null as "None".
    Raises BadConversation, naming the turn.
    """
    turns = _listed(cell, "the conversation", 'a list of turns such as {"role": "user", "content": "…"}')
    if not turns:
        raise BadConversation("the conversation is empty", expected="at least one turn")
    filled = not isinstance(cell, str)
    was_share_gpt = any(isinstance(turn, Mapping) and "from" in turn and "role" not in turn for turn in turns)
    read = _from_share_gpt if was_share_gpt else _turn
    messages = [read(turn, number, filled=filled) for number, turn in enumerate(turns, start=1)]
    if sum(len(turn.get("content", "")) for turn in messages) > _MAX_CHARACTERS:
        raise BadConversation(f"the conversation is longer than {_MAX_CHARACTERS:,} characters")
    return Conversation(messages=messages, tools=_tools(tools), was_share_gpt=was_share_gpt)


def require_learnable(conversation: Conversation) -> None:
    """Raise BadConversation where there is nothing to learn, or something stands behind all that is learned."""
    roles = [turn["role"] for turn in conversation.messages]
    if ASSISTANT not in roles:
        raise BadConversation(
            "no turn is the assistant's, so there is nothing to learn", expected="an assistant's turn"
        )
    if len(roles) == 1:
        raise _nothing_before()
    if roles[-1] != ASSISTANT:
        raise BadConversation(
            f"the last turn, {len(roles)}, is of the role {roles[-1]}, and nothing is learned from it",
            expected="a conversation that ends with the assistant's turn",
            fix="add the assistant's answer, or remove the turn",
        )


def to_be_continued(conversation: Conversation) -> Conversation:
    """Return the turns before the assistant's answer; an answer at the end is left out."""
    messages = conversation.messages
    if messages[-1]["role"] == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        raise _nothing_before()
    return Conversation(messages=messages, tools=conversation.tools, was_share_gpt=conversation.was_share_gpt)


def _nothing_before() -> BadConversation:
    what = "nothing stands before the assistant's turn"
    return BadConversation(what, expected="a turn to answer", fix="add the user's turn")


def _listed(cell: Any, what: str, expected: str) -> list[Any]:
    if cell is None:
        raise BadConversation(f"{what} is missing", expected=expected)
    if isinstance(cell, str):
        try:
            cell = DECODER.decode(cell)
        except (ValueError, RecursionError) as error:
            raise BadConversation(f"{what} is a text that is not JSON ({error})", expected=expected) from None
    if not isinstance(cell, list | tuple):
        raise BadConversation(f"{what} is {_kind(cell)}", expected=expected)
    return list(cell)


def _turn(value: Any, number: int, *, filled: bool) -> Turn:
    if not isinstance(value, Mapping):
        raise BadConversation(f"turn {number} is {_kind(value)}", expected="an object with role and content")
    turn = {name: item for name, item in value.items() if item is not None}
    turn["role"] = _role(turn.get("role"), number)
    calls = turn.pop("tool_calls", None)
    if calls:
        turn["tool_calls"] = _calls(_without_nulls(calls) if filled else calls, turn["role"], number)
    if "content" in turn:
        turn["content"] = _content(turn["content"], number)
    elif not calls:
        raise BadConversation(
            f"turn {number} ({turn['role']}) has no content",
            expected="content as text; only an assistant's turn with tool_calls goes without",
        )
    given = next((name for name in REASONING if name in turn), None)
    if given is not None:  # under the names that templates look for, as transformers has it
        if not isinstance(turn[given], str):
            raise BadConversation(f"the {given} of turn {number} is {_kind(turn[given])}", expected="text")
        turn = {"thinking": turn[given], **turn, "reasoning_content": turn[given]}
    return turn


def _from_share_gpt(value: Any, number: int, *, filled: bool) -> Turn:
    if not isinstance(value, Mapping) or "from" not in value or "role" in value:
        raise BadConversation(
            f"turn {number} is written in another form than the turns with `from` and `value`",
            expected="one form in a conversation: role and content in all turns, or from and value",
        )
    role = _SHARE_GPT.get(str(value["from"]))
    if role is None:
        raise BadConversation(
            f"turn {number} is from {value['from']!r}", expected=f"one of {', '.join(_SHARE_GPT)}", fix=_FIX_ROLES
        )
    others = {name: item for name, item in value.items() if name not in ("from", "value")}
    return _turn({**others, "role": role, "content": value.get("value")}, number, filled=filled)


_FIX_ROLES = "rewrite the turn with role and content (and tool_calls where the assistant calls a tool)"


def _role(role: Any, number: int) -> str:
    if not isinstance(role, str):
        what = "has no role" if role is None else f"has a role that is {_kind(role)}"
        raise BadConversation(f"turn {number} {what}", expected=f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        nearest = difflib.get_close_matches(role.strip().lower(), [*_MEANT, *ROLES], n=1)
        meant = _MEANT.get(nearest[0], nearest[0]) if nearest else ""
        raise BadConversation(
            f"turn {number} has the role {role[:40]!r}",
            expected=f"one of {', '.join(ROLES)}",
            fix=f"write {meant}" if meant else "",
        )
    return role


def _content(content: Any, number: int) -> str:
    """Return the text; several parts are joined, as templates that know parts do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadConversation(f"the content of turn {number} is {_kind(content)}", expected="text, or a list of texts")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in (None, "text"):
            raise BadConversation(
                f"the content of turn {number} holds a part of the type {kind!r}", expected="parts of the type text"
            )
        if not isinstance(text, str):
            raise BadConversation(
                f"a part of the content of turn {number} is {_kind(part)} without text",
                expected='{"type": "text", "text": "…"}',
            )
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, role: str, number: int) -> list[Turn]:
    what = f"the tool_calls of turn {number}"
    if role != ASSISTANT:
        raise BadConversation(f"turn {number} calls a tool and is of the role {role}", expected=f"the role {ASSISTANT}")
    return [_call(call, what) for call in _listed(calls, what, _A_CALL)]


_A_CALL = 'a list such as [{"type": "function", "function": {"name": "…", "arguments": {…}}}]'


def _call(call: Any, what: str) -> Turn:
    """Return a call with its arguments as a mapping: APIs write them as JSON text, which templates would quote."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise BadConversation(f"{what} hold an entry without a function's name", expected=_A_CALL)
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise BadConversation(f"{what}: the arguments of {inner['name']} are not JSON ({error})") from None
    if not isinstance(arguments, Mapping):
        raise BadConversation(
            f"{what}: the arguments of {inner['name']} are {_kind(arguments)}", expected="an object of names and values"
        )
    known = {**inner, "arguments": dict(arguments)}
    return {**call, "function": known} if "function" in call else known


def _tools(cell: Any) -> list[Turn] | None:
    if cell is None or (isinstance(cell, str) and cell.strip() in ("", "null")):
        return None
    tools = _listed(cell, "the list of tools", 'a list of JSON schemas, each {"type": "function", "function": {…}}')
    if not isinstance(cell, str):
        tools = _without_nulls(tools)
    for number, tool in enumerate(tools, start=1):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise BadConversation(
                f"tool {number} has no name",
                expected='{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}',
            )
    return tools or None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _kind(value: Any) -> str:
    return "null" if value is None else kind_of(value)
