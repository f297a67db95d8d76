"""Rows with conversations as texts, and what is wrong with those that are none."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from brim.config import ChatConfig
from brim.data.blocks import Keys, blocks
from brim.data.chat_day import today
from brim.data.chat_end import end_ids_of_turns
from brim.data.chat_messages import ASSISTANT, BadConversation, Conversation, conversation_of
from brim.data.chat_render import ConversationRenderer
from brim.data.chat_template import ChatTemplate, read_template
from brim.data.columns import Column
from brim.data.encoder import TextEncoder
from brim.data.row_faults import RowFaults
from brim.data.source import Source
from brim.data.texts import Chat, Piece, Texts
from brim.notes import warning

TOOLS_COLUMN = "tools"


@dataclass(slots=True, kw_only=True)
class ChatPrompter:
    """What a configuration makes of a source's conversations.

    faults: rows that are no conversation, or none that the template writes; they are left out of the texts, and
    whoever has drawn all texts decides about them.
    """

    source: Source
    renderer: ConversationRenderer
    messages_column: str
    tools_column: str | None
    with_answers: bool
    faults: RowFaults
    standing_notes: tuple[str, ...]
    num_share_gpt: int = 0
    columns: tuple[Column, ...] = field(default=())  # with rules for missing cells: a conversation has none
    bare_template: str = ""

    @property
    def used_columns(self) -> tuple[str, ...]:
        """The names of all columns that are read."""
        names = [name for name in (self.messages_column, self.tools_column) if name is not None]
        return tuple(dict.fromkeys(names))

    def texts(self, keys: Keys) -> Iterator[Texts]:
        """These rows (ascending) in batches, without those that cannot be used."""
        for batch_keys, block in blocks(self.source.table.select(list(self.used_columns)), keys):
            conversations = block[self.messages_column].to_pylist()
            tools = [None] * len(conversations) if self.tools_column is None else block[self.tools_column].to_pylist()
            made = [self._chat(*row) for row in zip(batch_keys.tolist(), conversations, tools, strict=True)]
            kept = [number for number, chat in enumerate(made) if chat is not None]
            if kept:
                yield self._texts(batch_keys[kept], [chat for chat in made if chat is not None])

    def notes(self) -> list[str]:
        """What a person should know of the rows drawn so far."""
        notes = list(self.standing_notes)
        if self.num_share_gpt:
            rows = "1 row is" if self.num_share_gpt == 1 else f"{self.num_share_gpt:,} rows are"
            notes.append(f"{rows} in the ShareGPT form (`from`, `value`) and read as role and content")
        thoughtless = self.renderer.num_without_thoughts
        if thoughtless:
            rows = "1 row" if thoughtless == 1 else f"{thoughtless:,} rows"
            told = f"the chat template drops the thoughts (reasoning_content) of the last answer of {rows}"
            notes.append(warning(told, topic="rows"))
        return notes

    def _texts(self, keys: Keys, chats: list[Chat]) -> Texts:
        cut = -1 if self.with_answers else None
        return Texts(
            keys=keys,
            prompts=["".join(piece.text for piece in chat.pieces[:cut]) for chat in chats],
            answers=[chat.pieces[-1].text for chat in chats] if self.with_answers else [],
            chats=chats,
        )

    def _chat(self, key: int, messages: Any, tools: Any) -> Chat | None:
        try:
            conversation = conversation_of(messages, tools)
            pieces = self._pieces(conversation)
        except BadConversation as bad:
            self.faults.add(key, bad.problem)
            return None
        self.num_share_gpt += conversation.was_share_gpt
        return Chat(
            pieces=pieces,
            own_texts=tuple(turn.get("content", "") for turn in conversation.messages),
            reply=_reply(conversation) if self.with_answers else None,
        )

    def _pieces(self, conversation: Conversation) -> tuple[Piece, ...]:
        return self.renderer.learned(conversation) if self.with_answers else self.renderer.prompt(conversation)


def chat_prompter(chat: ChatConfig, source: Source, encoder: TextEncoder, *, with_answers: bool) -> ChatPrompter:
    """The columns are there, as `prompter` has seen. Raises ConfigError or ModelError for an unusable template."""
    tools_column, notes = chat.tools, []
    if tools_column is None and TOOLS_COLUMN in source.table.column_names:
        tools_column = TOOLS_COLUMN
        notes.append("the column `tools` gives the conversations their tools (to use another, set chat.tools)")
    template = chat_template(chat, encoder)
    if with_answers and not end_ids_of_turns(template, encoder):
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
    """How many of a column's conversations do not end with the assistant's turn; what is none is left to others."""
    count = 0
    for _, block in blocks(source.table.select([column]), source.usable_rows()):
        for cell in block[column].to_pylist():
            with suppress(BadConversation):
                count += conversation_of(cell).messages[-1]["role"] != ASSISTANT
    return count


def _reply(conversation: Conversation) -> str | None:
    """What the last turn says; None where it calls a tool, and need say nothing."""
    last = conversation.messages[-1]
    return None if "tool_calls" in last else last.get("content")


def chat_template(chat: ChatConfig, encoder: TextEncoder) -> ChatTemplate:
    """The template that a configuration names, ready to write. Raises ConfigError or ModelError."""
    day = today() if chat.date is None else datetime.date.fromisoformat(chat.date)
    texts = read_template(chat.template, encoder.folder)
    return ChatTemplate(texts, special_tokens=encoder.special_tokens, today=day)


def _never_ends(template: ChatTemplate) -> str:
    return (
        f"THE MODEL DOES NOT LEARN TO STOP: the chat template {template.where} writes no special token after the "
        "assistant's turn; use one that does (with eos_token, say), or generation runs to generation.max_new_tokens"
    )
