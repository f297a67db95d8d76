"""Run `brim chat`: let a person talk with a model in the terminal."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.options import ConfigOrRun, Overrides, is_run, message, open_model, say
from brim.errors import BrimError, InputError
from brim.notes import status

if TYPE_CHECKING:
    from brim.workflows.prediction import Conversation


_PROMPT = "> "


_COMMANDS = "/reset, /system TEXT, /set KEY VALUE (a key of generation), /help, /quit"


def chat(config_or_run: ConfigOrRun, overrides: Overrides = None) -> None:
    """Answer what is typed, line by line.

    It is a conversation if the configuration has `chat`, or if a base model's folder has a chat template.

    Ctrl-C stops an answer, Ctrl-D leaves. /help lists the commands.
    """
    overrides = [*_conversing(config_or_run), *(overrides or [])]
    notes: list[str] = []  # kept until the answer to the current line has ended
    from brim.report import Screen

    with Screen() as screen:
        screen(status("loading the model"))
        conversation = open_model(config_or_run, overrides).chat(say=notes.append)
    is_person = sys.stdin.isatty()
    if is_person:
        kind = "a conversation" if conversation.remembers else "each prompt stands alone"
        notes.append(f"{kind}; {_COMMANDS}; Ctrl-C stops an answer, Ctrl-D leaves")
    _say_all(notes)
    for line in _typed() if is_person else _piped():
        try:
            if not _obey(line, conversation):
                return
        except BrimError as error:
            if not is_person:
                raise
            notes.append(message(error.problems))
        finally:
            _say_all(notes)


def _conversing(path: Path) -> list[str]:
    """Return the override that makes a base model with a chat template converse; its folder cannot say so itself."""
    from brim.data.chat import has_template

    return ["chat={}"] if path.is_dir() and not is_run(path) and has_template(path) else []


def _say_all(notes: list[str]) -> None:
    for note in notes:
        say(note)
    notes.clear()


def _obey(line: str, conversation: Conversation) -> bool:
    """Do what a line asks for; return False to leave."""
    if not line.startswith("/"):
        if line.strip():
            _answer(line, conversation)
        return True
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if command == "/quit":
        return False
    if command == "/reset":
        conversation.reset()
    elif command == "/system":
        conversation.set_system(rest or None)
    elif command == "/set" and " " in rest:
        key, _, value = rest.partition(" ")
        conversation.set(key, value)
    elif command == "/help":
        say(_COMMANDS)
    else:
        raise InputError(
            what=f"no such command: {line}",
            expected=_COMMANDS,
            fix="begin a text that is no command with a space, not with /",
        )
    return True


def _answer(text: str, conversation: Conversation) -> None:
    """Show an answer as it is generated; Ctrl-C stops it, and what has been said stays."""
    is_empty = True
    with closing(conversation.ask(text)) as pieces:
        try:
            for piece in pieces:
                print(_shown(piece), end="", flush=True)
                is_empty = False
        except KeyboardInterrupt:
            print()
            say("stopped")
            return
    print(flush=True)
    if is_empty:
        say("the answer is empty: the model ended it at once")


def _typed() -> Iterator[str]:
    """Yield the lines that a person types; where Python has readline, they can be edited and recalled."""
    with suppress(ImportError):
        import readline  # noqa: F401 (changes what `input` does)
    while True:
        try:
            line = input(_PROMPT)
        except EOFError:
            print()
            return
        yield line


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.removesuffix("\n")


def _shown(piece: str) -> str:
    """Return a piece of text; on a terminal, escape the control characters."""
    if piece.isprintable() or not sys.stdout.isatty():
        return piece
    return "".join(
        each.encode("unicode_escape").decode() if unicodedata.category(each) == "Cc" and each not in "\n\t" else each
        for each in piece
    )
