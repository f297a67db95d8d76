"""Render rows with conversations as text, and find which of it the assistant says.

What is learned of a turn lies between two texts: the conversation before it, with the beginning of an answer (what a
prediction would go on from), and the conversation up to it. Both must be beginnings of the whole text: then any
template will do, and what is learned is what a prediction has to write.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from brim.config.schema import ChatConfig
from brim.data.chat.messages import (
    ASSISTANT,
    BEGINNINGS,
    REASONING,
    TOOLS,
    BadConversation,
    Conversation,
    Turn,
    conversation_of,
    require_learnable,
    to_be_continued,
)
from brim.data.chat.sandbox import Refusal, TemplateFault
from brim.data.chat.template import ChatTemplate, read_template, today
from brim.data.read import RowFaults, Source, blocks
from brim.data.tokens import Chat, Piece, TextEncoder, Texts
from brim.notes import warning
from brim.units import format_count

TOOLS_COLUMN = "tools"


@dataclass(slots=True, kw_only=True)
class ChatPrompter:
    """Make prompts and answers of a source's conversations, as a configuration says.

    faults: rows that are not conversations, or that the template does not write; they are left out of the texts,
    and whoever has drawn all texts decides about them.
    """

    source: Source
    renderer: ConversationRenderer
    messages_column: str
    tools_column: str | None
    with_answers: bool
    faults: RowFaults
    standing_notes: tuple[str, ...]
    num_share_gpt: int = 0
    columns: tuple[()] = ()  # with rules for missing cells: a conversation has none
    bare_template: str = ""

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Return the names of all columns that are read."""
        names = [name for name in (self.messages_column, self.tools_column) if name is not None]
        return tuple(dict.fromkeys(names))

    def texts(self, keys: npt.NDArray[np.int64]) -> Iterator[Texts]:
        """Give these rows (ascending) in batches, without those that cannot be used."""
        for batch_keys, block in blocks(self.source.table.select(list(self.used_columns)), keys):
            conversations = block[self.messages_column].to_pylist()
            tools = [None] * len(conversations) if self.tools_column is None else block[self.tools_column].to_pylist()
            made = [self._chat(*row) for row in zip(batch_keys.tolist(), conversations, tools, strict=True)]
            kept = [number for number, chat in enumerate(made) if chat is not None]
            if kept:
                yield self._texts(batch_keys[kept], [chat for chat in made if chat is not None])

    def notes(self) -> list[str]:
        """Return notes on the rows drawn so far."""
        notes = list(self.standing_notes)
        if self.num_share_gpt:
            rows = format_count(self.num_share_gpt, "row is", "rows are")
            notes.append(f"{rows} in the ShareGPT form (`from`, `value`) and read as role and content")
        if self.renderer.num_without_thoughts:
            rows = format_count(self.renderer.num_without_thoughts, "row")
            note = f"the chat template drops the thoughts (reasoning_content) of the last answer of {rows}"
            notes.append(warning(note, topic="rows"))
        return notes

    def _texts(self, keys: npt.NDArray[np.int64], chats: list[Chat]) -> Texts:
        cut = -1 if self.with_answers else None
        prompts = ["".join(piece.text for piece in chat.pieces[:cut]) for chat in chats]
        answers = [chat.pieces[-1].text for chat in chats] if self.with_answers else []
        return Texts(keys=keys, prompts=prompts, answers=answers, chats=chats)

    def _chat(self, key: int, messages: Any, tools: Any) -> Chat | None:
        try:
            conversation = conversation_of(messages, tools)
            write = self.renderer.learned if self.with_answers else self.renderer.prompt
            pieces = write(conversation)
        except BadConversation as bad:
            self.faults.add(key, bad.problem)
            return None
        self.num_share_gpt += conversation.was_share_gpt
        last = conversation.messages[-1]
        has_reply = self.with_answers and "tool_calls" not in last  # a call needs no content
        return Chat(
            pieces=pieces,
            own_texts=tuple(turn.get("content", "") for turn in conversation.messages),
            reply=last.get("content") if has_reply else None,
        )


def chat_prompter(chat: ChatConfig, source: Source, encoder: TextEncoder, *, with_answers: bool) -> ChatPrompter:
    """Make a prompter for columns that `prompter` has found. Raises ConfigError or ModelError for a bad template."""
    tools_column, notes = chat.tools, []
    if tools_column is None and TOOLS_COLUMN in source.table.column_names:
        tools_column = TOOLS_COLUMN
        notes.append("the column `tools` gives the conversations their tools (to use another, set chat.tools)")
    template = chat_template(chat, encoder)
    if with_answers and not template.end_ids(encoder):
        notes.append(warning(_never_ends(template), topic="rows"))
    return ChatPrompter(
        source=source,
        renderer=ConversationRenderer(template=template, supervise=chat.supervise),
        messages_column=chat.messages,
        tools_column=tools_column,
        with_answers=with_answers,
        faults=RowFaults(locate=source.locate),
        standing_notes=tuple(notes),
    )


def num_unanswered(source: Source, column: str) -> int:
    """Count a column's conversations that do not end with the assistant's turn; other cells do not count."""
    count = 0
    for _, block in blocks(source.table.select([column]), source.usable_rows()):
        for cell in block[column].to_pylist():
            with suppress(BadConversation):
                count += conversation_of(cell).messages[-1]["role"] != ASSISTANT
    return count


def chat_template(chat: ChatConfig, encoder: TextEncoder) -> ChatTemplate:
    """Return the template that a configuration names, ready to write. Raises ConfigError or ModelError."""
    day = today() if chat.date is None else datetime.date.fromisoformat(chat.date)
    texts = read_template(chat.template, encoder.folder)
    return ChatTemplate(texts, special_tokens=encoder.special_tokens, today=day)


def _never_ends(template: ChatTemplate) -> str:
    return (
        f"THE MODEL DOES NOT LEARN TO STOP: the chat template {template.where} writes no special token after the "
        "assistant's turn; use one that does (with eos_token, say), or generation runs to generation.max_new_tokens"
    )


_THOUGHTS = "zqtqz"  # marks the thoughts of the last turn


_SHOWN = 40  # characters of a text that differs


_ANOTHER = "name another template with chat.template"


_LAST_ALONE = "set chat.supervise: last, which learns the last turn alone"


@dataclass(slots=True, kw_only=True)
class ConversationRenderer:
    """Write conversations with a template, and part them into what is learned and what is not."""

    template: ChatTemplate
    supervise: Literal["all", "last"]
    num_without_thoughts: int = 0  # conversations learned from, of whose last turn the template drops the thoughts
    thoughts_dropped: dict[Any, bool] = field(default_factory=dict)  # by shape, of conversations that are written whole

    def learned(self, conversation: Conversation) -> tuple[Piece, ...]:
        """Return the whole text in pieces that are learned or not; the last piece is the last answer.

        Raises BadConversation: the template refuses the conversation, drops or merges turns, or its texts of a
        beginning and of the whole differ.
        """
        require_learnable(conversation)
        self._require_full_weight(conversation)
        text, drops_thoughts = self._checked_text(conversation, for_answer=False)
        pieces = tuple(self._cut(conversation, text, for_answer=False))
        self.num_without_thoughts += drops_thoughts
        return pieces

    def prompt(self, conversation: Conversation) -> tuple[Piece, ...]:
        """Return the text up to the beginning of the answer, in the same pieces as in training.

        Where a turn before it has no place in that text, no row like it was learned, and the text is one piece.
        """
        asked = to_be_continued(conversation)
        text, _ = self._checked_text(asked, for_answer=True)
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

    def _require_full_weight(self, conversation: Conversation) -> None:
        """Refuse the key with which some data says that a turn is not to be learned."""
        for at in self._learned_turns(conversation):
            weight = conversation.messages[at].get("weight", 1)
            if weight != 1:
                raise BadConversation(
                    f"turn {at + 1} ({ASSISTANT}) has the weight {weight!r}, and brim would learn it as any other",
                    expected="no weight, or 1",
                    fix=f"{_LAST_ALONE}, or take the weight off to learn the turn"
                    if at < len(conversation.messages) - 1
                    else "end the conversation before the turn, or take the weight off to learn it",
                )

    def _checked_text(self, conversation: Conversation, *, for_answer: bool) -> tuple[str, bool]:
        """Return the whole text, and whether the thoughts of the last turn are missing from it."""
        text = self._text(conversation, for_answer=for_answer)
        shape = _shape(conversation, for_answer)
        if shape not in self.thoughts_dropped:
            marked, marks = _marked(conversation)
            try:
                seen = self.template.render(marked.messages, marked.tools, add_generation_prompt=for_answer)
            except TemplateFault:  # it looks into the texts, and trips over marks
                self._require_unmerged(conversation)
                return text, False
            self._require_whole(seen, marks)
            self._require_unmerged(marked)
            self.thoughts_dropped[shape] = _thinks(marked.messages[-1]) and _THOUGHTS not in seen
        return text, self.thoughts_dropped[shape]

    def _cut(self, conversation: Conversation, text: str, *, for_answer: bool) -> list[Piece]:
        """Cut the text into pieces: before each of the assistant's turns, the turn itself, and what is left.

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
        """Return how far the text of the first turns reaches in the whole one."""
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
        except Refusal as refusal:
            raise BadConversation(
                f"the chat template {self.template.where} refuses {_part(num_turns, for_answer)}: {refusal}",
                expected="roles in the order that the template asks for",
                fix=self._fix(num_turns),
            ) from None
        except TemplateFault as fault:
            self._require_known_calls(messages, conversation.tools, for_answer=for_answer)
            raise BadConversation(
                f"the chat template {self.template.where} cannot write {_part(num_turns, for_answer)}: {fault}",
                expected="turns with all that the template reads",
                fix=self._fix(num_turns),
            ) from None
        except UnicodeEncodeError:
            raise BadConversation(
                "the conversation holds half of a character (a lone surrogate such as \\ud83d), which no text can hold",
                fix="write the whole character, or remove it",
            ) from None
        return text

    def _require_known_calls(self, messages: list[Turn], tools: list[Turn] | None, *, for_answer: bool) -> None:
        """Say of a template that trips over calls without content whether it would write them beside an empty one."""
        silent = [number for number, turn in enumerate(messages, start=1) if "content" not in turn]
        if not silent:
            return
        marked, marks = _marked(Conversation(messages=[{"content": "", **turn} for turn in messages], tools=tools))
        try:
            text = self.template.render(marked.messages, marked.tools, add_generation_prompt=for_answer)
        except TemplateFault:
            return
        turn = f"turn {silent[0]} ({ASSISTANT})"
        if any(mark not in text for mark, what in marks.items() if what.startswith(_A_CALL)):
            raise BadConversation(
                f"the chat template {self.template.where} does not write the tool calls of {turn}",
                expected="a template that knows tools",
                fix=_ANOTHER,
            )
        raise BadConversation(
            f"the chat template {self.template.where} asks for the content of {turn}, which calls a tool and has none",
            expected="content beside tool_calls",
            fix=f'write "content": "", or {_ANOTHER}',
        )

    def _fix(self, num_turns: int | None = 0) -> str:
        if self.supervise == "all" and num_turns is not None:
            return f"{_LAST_ALONE}, or {_ANOTHER}"
        return f"correct the conversation, or {_ANOTHER}"

    def _require_whole(self, seen: str, marks: dict[str, str]) -> None:
        """Refuse what the template drops: each text is replaced by a mark, and each mark must come out again."""
        lost = [what for mark, what in marks.items() if mark not in seen]
        if lost:
            raise BadConversation(
                f"the chat template {self.template.where} drops {', '.join(lost[:3])}"
                + (f" and {len(lost) - 3} more" if len(lost) > 3 else ""),
                expected="a template that writes every turn",
                fix=f"remove {'it' if len(lost) == 1 else 'them'} from the conversation, or {_ANOTHER}",
            )

    def _require_unmerged(self, conversation: Conversation) -> None:
        """Refuse turns that the template writes as one: what it writes behind the first is then gone before the second.

        Folding the first system turn into the one after it, and grouping what several tools answered, is how some
        templates are meant. Other roles that follow each other are not merged by any.
        """
        messages = conversation.messages
        for second in range(1, len(messages)):
            one, other = messages[second - 1], messages[second]
            roles, mark = (one["role"], other["role"]), one.get("content", "").strip()
            is_meant = roles[1] in TOOLS or (second == 1 and roles[0] in BEGINNINGS)
            if is_meant or not mark or (ASSISTANT in roles and roles[0] != roles[1]):
                continue
            try:
                alone, both = (
                    self.template.render(messages[:end], conversation.tools, add_generation_prompt=False)
                    for end in (second, second + 1)
                )
            except TemplateFault:
                continue  # a beginning may be refused; the whole conversation is not
            if not both.rpartition(mark)[2].startswith(alone.rpartition(mark)[2]):
                raise BadConversation(
                    f"the chat template {self.template.where} merges the turns {second} and {second + 1} "
                    f"({roles[0]}, {roles[1]}) into one",
                    expected="a turn of its own for each",
                    fix=f"join them in the data, or {_ANOTHER}",
                )


_A_CALL = "a tool call of turn"


def _part(num_turns: int | None, for_answer: bool) -> str:
    """Name the turns that the template was given."""
    if num_turns is None:
        return "the conversation"
    if num_turns == 0:
        return "the beginning of the assistant's turn without a turn before it"
    turns = "the first turn" if num_turns == 1 else f"the first {num_turns} turns"
    return f"{turns}{' to be answered' if for_answer else ' alone'}"


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
    """Return all on which the marked text depends, but for values that templates only copy."""
    turns = tuple(
        (
            turn["role"],
            bool(turn.get("content", "").strip()),
            len(turn.get("tool_calls", ())),
            _thinks(turn),
            *sorted(turn),
        )
        for turn in conversation.messages
    )
    return turns, len(conversation.tools or ()), for_answer


def _thinks(turn: Turn) -> bool:
    return bool(turn.get(REASONING[0]))


def _marked(conversation: Conversation) -> tuple[Conversation, dict[str, str]]:
    """Return the conversation with a mark in place of each text and name, and what each mark stands for."""
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
        if _thinks(turn):  # many templates drop those of earlier turns, which loses no turn
            is_last = number == len(conversation.messages)
            changed |= dict.fromkeys(REASONING, _THOUGHTS if is_last else "zq-qz")
        if "tool_calls" in turn:
            what = f"{_A_CALL} {number}"
            changed["tool_calls"] = [_renamed(call, mark(what)) for call in turn["tool_calls"]]
        messages.append(changed)
    tools = conversation.tools
    if tools is not None:
        tools = [_renamed(tool, mark(f"tool {number}")) for number, tool in enumerate(tools, start=1)]
    return Conversation(messages=messages, tools=tools), marks


def _renamed(call: Turn, name: str) -> Turn:
    """Return a tool or a call under another name."""
    if "function" in call:
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}
