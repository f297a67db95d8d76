"""The tokens with which a chat template ends the assistant's turns: generation has to stop at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brim.data.chat_sandbox import TemplateFault
from brim.data.chat_template import ChatTemplate
from brim.data.encoder import TextEncoder

_QUESTION, _ANSWER, _TOOL, _CALLED = "zq0qz", "zq1qz", "zq2qz", "zq5qz"


def end_ids_of_turns(template: ChatTemplate, encoder: TextEncoder) -> list[int]:
    """The first special token after an answer, and after a tool call, in the text that the template writes.

    Seen on conversations of marks. Empty where no special token follows.
    """
    found = []
    for text, mark in _probes(template):
        tail = text[text.rindex(mark) + len(mark) :]
        (ids,) = encoder.encode([tail], special_tokens=False)
        found += [token_id for token_id in ids if token_id in encoder.special_ids][:1]
    return list(dict.fromkeys(found))


def _probes(template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Texts of short conversations, as far as the template takes them, and the mark at which their answer stands."""
    asked = [{"role": "system", "content": "zq3qz"}, {"role": "user", "content": _QUESTION}]
    call = {"id": "zq4qz4zq4", "type": "function", "function": {"name": _CALLED, "arguments": {}}}
    tool = {"name": _TOOL, "description": _TOOL, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    answers: list[tuple[dict[str, Any], list[dict[str, Any]] | None, str]] = [
        ({"content": _ANSWER}, None, _ANSWER),
        ({"content": "", "tool_calls": [call]}, tools, _CALLED),
    ]
    for answer, given, mark in answers:
        for beginning in (asked[1:], asked):
            try:
                messages = [*beginning, {"role": "assistant", **answer}]
                text = template.render(messages, given, add_generation_prompt=False)
            except TemplateFault:
                continue
            if mark in text:
                yield text, mark
                break
