"""Read a chat template from where it stands, and write conversations out by it.

The day that a template sees as today is fixed once, so that a row is the same text on every day. Generation has to
stop at the tokens with which the template ends the assistant's turns.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import nodes

from brim.config import Choice
from brim.config.schema import ChatConfig
from brim.data.chat.sandbox import BoundedEnvironment, Overreach, TemplateFault
from brim.data.tokens import TextEncoder
from brim.errors import ConfigError, ModelError, Problem


def settled_day(chat: ChatConfig | None, encoder: TextEncoder) -> tuple[ChatConfig | None, list[Choice]]:
    """Set the day where the template asks for one and the section has none; return the choice that was made, too.

    Raises ConfigError or ModelError for a template that cannot be used.
    """
    if chat is None or chat.date is not None or not read_template(chat.template, encoder.folder).asks_for_day():
        return chat, []
    day = today().isoformat()
    reason = "today: the template asks for the day, and the run keeps it"
    return chat.model_copy(update={"date": day}), [Choice(key="chat.date", value=day, reason=reason)]


def today() -> datetime.date:
    """Return the day in the place where this runs."""
    return datetime.date.today()


_QUESTION, _ANSWER, _TOOL, _CALLED = "zq0qz", "zq1qz", "zq2qz", "zq5qz"


def _probes(template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Give texts of short conversations, as far as the template takes them, and the mark of their answer."""
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


TEMPLATE_FILE = "chat_template.jinja"


MORE_TEMPLATES = "additional_chat_templates"  # transformers' folder for templates with a name


_DEFAULT, _TOOL_USE = "default", "tool_use"


_MAX_BYTES = 1 << 20


Messages = Sequence[Mapping[str, Any]]


Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTexts:
    """Hold a template as it is written: one for all rows, or one for rows with tools beside it."""

    default: str
    tool_use: str | None  # for conversations with tools; None: the same as for all others
    where: str  # the file, for messages

    def as_one(self) -> str:
        """Return one text that writes the same: + keeps blanks before a tag, Jinja drops the line feed after it."""
        if self.tool_use is None:
            return self.default
        for_tools, for_others = (text.removesuffix("\n") for text in (self.tool_use, self.default))  # as Jinja does
        return f"{{% if tools is not none %}}\n{for_tools}{{%+ else %}}\n{for_others}{{%+ endif %}}"

    def asks_for_day(self) -> bool:
        """Return whether the text that comes out can depend on the day. Raises ModelError for a broken template."""
        environment = BoundedEnvironment(today=datetime.date.min)
        try:
            texts = [environment.parsed(text) for text in (self.default, self.tool_use) if text is not None]
        except TemplateFault as fault:
            raise ModelError(unusable(self.where, fault)) from None
        return any(name.name == "strftime_now" for text in texts for name in text.find_all(nodes.Name))


class ChatTemplate:
    """Write conversations with a template. special_tokens: the variables bos_token, eos_token and so on.

    Raises ModelError for a text that is not a template.
    """

    def __init__(self, texts: TemplateTexts, *, special_tokens: Mapping[str, str], today: datetime.date) -> None:
        self.where = texts.where
        self._special_tokens = dict(special_tokens)
        self._environment = BoundedEnvironment(today=today)
        try:
            self._default = self._environment.compiled(texts.default)
            self._tool_use = self._default if texts.tool_use is None else self._environment.compiled(texts.tool_use)
        except TemplateFault as fault:
            raise ModelError(unusable(texts.where, fault)) from None

    def render(self, messages: Messages, tools: Tools | None, *, add_generation_prompt: bool) -> str:
        """Write a conversation. add_generation_prompt: with the beginning of the assistant's answer.

        Raises TemplateFault where the template does not take this conversation, ModelError where it does what none may.
        """
        template = self._default if tools is None else self._tool_use
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._environment.run(template, variables)
        except Overreach as fault:
            raise ModelError(unusable(self.where, fault)) from None

    def end_ids(self, encoder: TextEncoder) -> list[int]:
        """Return the first special token after an answer, and after a tool call, in the text that is written.

        Seen on conversations of marks. Empty where no special token follows.
        """
        found = []
        for text, mark in _probes(self):
            tail = text[text.rindex(mark) + len(mark) :]
            (ids,) = encoder.encode([tail], special_tokens=False)
            found += [token_id for token_id in ids if token_id in encoder.special_ids][:1]
        return list(dict.fromkeys(found))


def read_template(template: str | None, tokenizer_folder: Path) -> TemplateTexts:
    """Read the texts that `chat.template` names, or the tokenizer's own.

    As transformers reads them: chat_template.jinja, else `chat_template` in tokenizer_config.json, which is one text
    or several with names. Raises ConfigError for a file that the user named and that cannot be read, and ModelError for
    a tokenizer without a template.
    """
    if template is None:
        found = _in_folder(tokenizer_folder)
        if found is None:
            raise ModelError(
                what="the tokenizer has no chat template, and chat.template names none",
                where=str(tokenizer_folder),
                expected=f"{TEMPLATE_FILE}, or chat_template in tokenizer_config.json",
                fix="name a Jinja file with chat.template (that of the model's chat variant, say)",
            )
        return found
    path = Path(template).expanduser()
    if path.is_dir():
        found = _in_folder(path)
        if found is None:
            raise ConfigError(_no_such_template(template, f"the folder holds no {TEMPLATE_FILE}"))
        return found
    if not path.is_file():
        raise ConfigError(_no_such_template(template, "there is no such file"))
    return TemplateTexts(default=_read(path), tool_use=None, where=str(path))


def has_template(tokenizer_folder: Path) -> bool:
    """Return whether the tokenizer brings a template that can be used."""
    try:
        read_template(None, tokenizer_folder)
    except ModelError:
        return False
    return True


def store_template(texts: TemplateTexts, folder: Path) -> None:
    """Make it the template of the tokenizer in a folder, as transformers stores it, in place of any that is there."""
    config = folder / "tokenizer_config.json"
    if config.is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings.pop("chat_template", None)
        config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / TEMPLATE_FILE).write_text(texts.as_one(), encoding="utf-8", newline="\n")


def _in_folder(folder: Path) -> TemplateTexts | None:
    named: dict[str, str] = {}
    where = folder / TEMPLATE_FILE
    if where.is_file():
        named[_DEFAULT] = _read(where)
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        named[path.stem] = _read(path)
    if not named:
        where = folder / "tokenizer_config.json"
        named = _from_config(where)
    if not named:
        return None
    if _DEFAULT not in named:
        raise ModelError(
            what=f"the tokenizer has several chat templates ({', '.join(sorted(named))}) and none called default",
            where=str(where),
            fix="write the one that is meant into a file and name it with chat.template",
        )
    return TemplateTexts(default=named[_DEFAULT], tool_use=named.get(_TOOL_USE), where=str(where))


def _from_config(path: Path) -> dict[str, str]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(what=f"{path.name} cannot be read: {error}", where=str(path)) from None
    given = config.get("chat_template") if isinstance(config, dict) else None
    if given is None:
        return {}
    if isinstance(given, str):
        return {_DEFAULT: given}
    if isinstance(given, list) and all(
        isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in given
    ):
        given = {entry["name"]: entry["template"] for entry in given}
    if isinstance(given, dict) and all(isinstance(text, str) for pair in given.items() for text in pair):
        return given
    raise ModelError(
        what="chat_template is neither a text nor a list of named texts",
        where=str(path),
        fix="copy the file from the original model again, or name a template with chat.template",
    )


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
        if len(content) > _MAX_BYTES:
            raise ModelError(what=f"the chat template is longer than {_MAX_BYTES:,} bytes", where=str(path))
        # As transformers reads it: a line may end as on Windows.
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelError(what=f"the chat template cannot be read: {reason}", where=str(path)) from None


def unusable(where: str, fault: TemplateFault) -> Problem:
    return Problem(
        what=f"the chat template cannot be used: {fault}",
        where=where,
        expected="a Jinja template as transformers' tokenizers have it",
        fix="correct it, or name another with chat.template",
    )


def _no_such_template(template: str, what: str) -> Problem:
    return Problem(
        what=f"chat.template: {what}: {template}",
        expected=f"a Jinja file, or a folder with {TEMPLATE_FILE}",
        fix="check the path; it is taken from the current folder",
    )
