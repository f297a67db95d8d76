"""A process that does not outlive the one that started it, however that ends."""

from __future__ import annotations

import os
import signal
import threading


def signal_when_alone(number: signal.Signals) -> None:
    """Send this process the signal once its stdin closes, whose other end the process that started it holds."""
    threading.Thread(target=_watch, args=(number,), daemon=True).start()


def _watch(number: signal.Signals) -> None:
    # Not sys.stdin: its lock would be held when Python ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), number)
