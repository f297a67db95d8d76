"""`chat`: conversations, written out by a chat template, instead of a prompt and an answer."""

import datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator

from brim.config.schema.base import Section, Text, key


def _as_text(value: Any) -> Any:
    """YAML reads 2026-01-31 without quotes as a date."""
    return value.isoformat() if type(value) is datetime.date else value


def _real_day(text: str) -> str:
    if datetime.date.fromisoformat(text).isoformat() != text:
        raise ValueError("not written as 2026-01-31")
    return text


Day: TypeAlias = Annotated[str, AfterValidator(_real_day), BeforeValidator(_as_text)]


class ChatConfig(Section):
    """Where the conversations stand and how they become text. The model learns what the assistant says."""

    messages: Text = key(
        "messages", "The column with the conversations: in each row a list of `{role, content}`.", brim=True
    )
    tools: Text | None = key(
        None,
        "The column with the tools that the assistant may call: in each row a list of JSON schemas. null: the column "
        "`tools`, where the data has one.",
        brim=True,
    )
    template: Text | None = key(
        None,
        "A file with a Jinja template, or a folder with one, such as a run's `model`. null: the tokenizer's own.",
        brim=True,
    )
    supervise: Literal["all", "last"] = key(
        "all",
        "The assistant's turns that are learned: all of them, or only the last one of each conversation.",
        brim=True,
    )
    date: Day | None = key(
        None,
        "The day that the template sees as today. null: where it asks for it, the day on which the run begins, which "
        "the run's config.yaml then records.",
        brim=True,
        expected="a day such as 2026-01-31, or null",
    )
