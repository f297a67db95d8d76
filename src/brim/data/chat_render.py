"""Conversations as text, and which of it the assistant says: found by rendering their beginnings, too.

What is learned of a turn lies between two texts: the conversation before it, with the beginning of an answer (what a
prediction would go on from), and the conversation up to it. Both must be beginnings of the whole text: then any
template will do, and what is learned is what a prediction has to write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from brim.data.chat_messages import (
    ASSISTANT,
    BEGINNINGS,
    TOOLS,
    BadConversation,
    Conversation,
    Turn,
    require_learnable,
    to_be_continued,
)
from brim.data.chat_sandbox import TemplateFault
from brim.data.chat_template import ChatTemplate
from brim.data.texts import Piece

_SHOWN = 40  # characters of a text that differs
_ANOTHER = "name another template with chat.template"


@dataclass(slots=True, kw_only=True)
class ConversationRenderer:
    """A template and what is learned of a conversation."""

    template: ChatTemplate
    supervise: Literal["all", "last"]
    whole_shapes: set[Any] = field(default_factory=set)  # of conversations of which the template drops nothing

    def learned(self, conversation: Conversation) -> tuple[Piece, ...]:
        """The whole text, what is learned apart from the rest; the last piece is the last answer.

        Raises BadConversation: the template refuses the conversation, drops or merges turns, or its texts of a
        beginning and of the whole differ.
        """
        require_learnable(conversation)
        text = self._checked_text(conversation, for_answer=False)
        return tuple(self._cut(conversation, text, for_answer=False))

    def prompt(self, conversation: Conversation) -> tuple[Piece, ...]:
        """The text up to the beginning of the answer, in the pieces that learning has made of it.

        Where a turn before it has no place in that text, no row like it was learned, and the text is one piece.
        """
        asked = to_be_continued(conversation)
        text = self._checked_text(asked, for_answer=True)
        whole = (Piece(text=text, supervised=False),)
        if self.supervise == "last":
            return whole
        try:
            pieces = self._cut(asked, text, for_answer=True)
        except BadConversation:
            return whole
        return tuple(Piece(text=piece.text, supervised=False) for piece in pieces)

    def _learned_turns(self, conversation: Conversation) -> list[int]:
        turns = [at for at, turn in enumerate(conversation.messages) if turn["role"] == ASSISTANT]
        return turns if self.supervise == "all" else turns[-1:]

    def _checked_text(self, conversation: Conversation, *, for_answer: bool) -> str:
        text = self._text(conversation, for_answer=for_answer)
        self._require_whole(conversation, for_answer=for_answer)
        self._require_unmerged(conversation)
        return text

    def _cut(self, conversation: Conversation, text: str, *, for_answer: bool) -> list[Piece]:
        """The text in pieces: before each of the assistant's turns, the turn itself, and what is left.

        for_answer: the text goes on with the beginning of an answer.
        """
        last = None if for_answer else len(conversation.messages) - 1
        pieces, done = [], 0
        for turn in self._learned_turns(conversation):
            start = self._length(conversation, text, turn, for_answer=True)
            end = len(text) if turn == last else self._length(conversation, text, turn + 1, for_answer=False)
            if not done <= start < end:
                raise BadConversation(
                    f"the template writes nothing for turn {turn + 1} (assistant) that could be learned",
                    expected="text of its own for each turn",
                    fix=self._fix(),
                )
            pieces += [Piece(text=text[done:start], supervised=False), Piece(text=text[start:end], supervised=True)]
            done = end
        if done < len(text):
            pieces.append(Piece(text=text[done:], supervised=False))
        return pieces

    def _length(self, conversation: Conversation, text: str, num_turns: int, *, for_answer: bool) -> int:
        """How far the text of the first turns reaches in the whole one."""
        beginning = self._text(conversation, num_turns, for_answer=for_answer)
        if not text.startswith(beginning):
            raise BadConversation(
                _differs(num_turns, beginning, text, for_answer=for_answer),
                expected="a template whose text of a conversation begins with the text of each of its beginnings",
                fix=self._fix(),
            )
        return len(beginning)

    def _text(self, conversation: Conversation, num_turns: int | None = None, *, for_answer: bool = False) -> str:
        messages = conversation.messages[:num_turns]
        try:
            text = self.template.render(messages, conversation.tools, add_generation_prompt=for_answer)
            text.encode()
        except TemplateFault as fault:
            raise BadConversation(
                f"{self._where(conversation, num_turns, for_answer)}: {fault}",
                expected=_EXPECTED,
                fix=self._fix(num_turns),
            ) from None
        except UnicodeEncodeError:
            raise BadConversation(
                "the conversation holds half of a character (a lone surrogate such as \\ud83d), which no text can hold",
                fix="write the whole character, or remove it",
            ) from None
        return text

    def _where(self, conversation: Conversation, num_turns: int | None, for_answer: bool) -> str:
        refused = f"the chat template {self.template.where} refuses"
        if num_turns is None:
            return f"{refused} the conversation"
        if num_turns == 0:
            return f"{refused} to begin with the assistant's turn"
        turns = "the first turn" if num_turns == 1 else f"the first {num_turns} turns"
        return f"{refused} {turns}{' to be answered' if for_answer else ' alone'}"

    def _fix(self, num_turns: int | None = 0) -> str:
        if self.supervise == "all" and num_turns is not None:
            return f"set chat.supervise: last, which learns the last turn alone, or {_ANOTHER}"
        return f"correct the conversation, or {_ANOTHER}"

    def _require_whole(self, conversation: Conversation, *, for_answer: bool) -> None:
        """Refuse what the template drops: each text is replaced by a mark, and each mark must come out again."""
        shape = _shape(conversation, for_answer)
        if shape in self.whole_shapes:
            return
        marked, marks = _marked(conversation)
        try:
            text = self.template.render(marked.messages, marked.tools, add_generation_prompt=for_answer)
        except TemplateFault:
            return  # it reads what the texts say, and marks say nothing to it; the true text has been rendered
        lost = [what for mark, what in marks.items() if mark not in text]
        if lost:
            raise BadConversation(
                f"the chat template {self.template.where} drops {', '.join(lost[:3])}"
                + (f" and {len(lost) - 3} more" if len(lost) > 3 else ""),
                expected="a template that writes every turn",
                fix=f"remove {'it' if len(lost) == 1 else 'them'} from the conversation, or {_ANOTHER}",
            )
        self.whole_shapes.add(shape)

    def _require_unmerged(self, conversation: Conversation) -> None:
        """Refuse turns that the template writes as one: the text up to the first would then not end before the second.

        The assistant's turns are looked at when the text is cut. Folding the first system turn into the one after it,
        and grouping what several tools answered, is how some templates are meant.
        """
        messages = conversation.messages
        for second in range(1, len(messages)):
            roles = (messages[second - 1]["role"], messages[second]["role"])
            if ASSISTANT in roles or roles[1] in TOOLS or (second == 1 and roles[0] in BEGINNINGS):
                continue
            try:
                before = self.template.render(messages[:second], conversation.tools, add_generation_prompt=False)
                both = self.template.render(messages[: second + 1], conversation.tools, add_generation_prompt=False)
            except TemplateFault:
                continue  # only the whole conversation need be to the template's taste
            if not (both.startswith(before) and len(before) < len(both)):
                raise BadConversation(
                    f"the chat template {self.template.where} merges the turns {second} and {second + 1} "
                    f"({roles[0]}, {roles[1]}) into one",
                    expected="a turn of its own for each",
                    fix=f"join them in the data, or {_ANOTHER}",
                )


_EXPECTED = "roles in the order that the template asks for"


def _differs(num_turns: int, beginning: str, text: str, *, for_answer: bool) -> str:
    at = next(
        (number for number, (one, other) in enumerate(zip(beginning, text, strict=False)) if one != other),
        min(len(beginning), len(text)),
    )
    start = max(0, at - _SHOWN // 2)
    alone, whole = beginning[start : start + _SHOWN], text[start : start + _SHOWN]
    before = " with the beginning of the next answer" if for_answer else ""
    turns = "no turn" if num_turns == 0 else "turn 1" if num_turns == 1 else f"turns 1 to {num_turns}"
    return (
        f"the template writes {turns}{before} otherwise alone than in the whole conversation, so that what the "
        f"assistant says cannot be told apart: {alone!r} alone, {whole!r} in the whole"
    )


def _shape(conversation: Conversation, for_answer: bool) -> Any:
    """All on which the marked text depends, but for values that templates only copy."""
    turns = tuple(
        (turn["role"], bool(turn.get("content", "").strip()), len(turn.get("tool_calls", ())), *sorted(turn))
        for turn in conversation.messages
    )
    return turns, len(conversation.tools or ()), for_answer


def _marked(conversation: Conversation) -> tuple[Conversation, dict[str, str]]:
    """The conversation with a mark in place of each text and name, and what each mark stands for."""
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        text = f"zq{len(marks)}qz"
        marks[text] = what
        return text

    messages = []
    for number, turn in enumerate(conversation.messages, start=1):
        changed: Turn = dict(turn)
        if turn.get("content", "").strip():
            changed["content"] = mark(f"turn {number} ({turn['role']})")
        if "tool_calls" in turn:
            what = f"a tool call of turn {number}"
            changed["tool_calls"] = [_renamed(call, mark(what)) for call in turn["tool_calls"]]
        messages.append(changed)
    tools = conversation.tools
    if tools is not None:
        tools = [_renamed(tool, mark(f"tool {number}")) for number, tool in enumerate(tools, start=1)]
    return Conversation(messages=messages, tools=tools), marks


def _renamed(call: Turn, name: str) -> Turn:
    """A tool or a call under another name."""
    if "function" in call:
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}
