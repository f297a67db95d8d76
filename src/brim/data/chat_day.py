"""The day that a chat template sees as today: it is settled once, so that a row is the same text on every day."""

from __future__ import annotations

import datetime

from brim.config import ChatConfig, Choice
from brim.data.chat_template import read_template
from brim.data.encoder import TextEncoder


def settled_day(chat: ChatConfig | None, encoder: TextEncoder) -> tuple[ChatConfig | None, list[Choice]]:
    """The section with a day, and the choice that was made, where the template asks for one and none is set.

    Raises ConfigError or ModelError for a template that cannot be used.
    """
    if chat is None or chat.date is not None or not read_template(chat.template, encoder.folder).asks_for_day():
        return chat, []
    day = today().isoformat()
    reason = "today: the template asks for the day, and the run keeps it"
    return chat.model_copy(update={"date": day}), [Choice(key="chat.date", value=day, reason=reason)]


def today() -> datetime.date:
    """The day in the place where this runs."""
    return datetime.date.today()
