"""Ctrl-C, heard between two steps."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from brim.errors import Problem

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C (or SIGTERM) sets, so that the step ends and is saved; a second one ends at once.

    Outside the main thread, where signals cannot be caught, the event is never set.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def request(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, request) for number in _SIGNALS}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interruption(problem: Problem) -> KeyboardInterrupt:
    """Return Python's own exception for Ctrl-C, which tells what was saved and how to go on.

    When Python exits, torch._dynamo imports tabulate, whose `eval` makes Python forget that it was interrupted: it
    would leave with 1 instead of 130. So that is imported before.
    """
    with suppress(ImportError):
        importlib.import_module("tabulate")
    return KeyboardInterrupt(problem)
