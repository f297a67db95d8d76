"""What libraries say to programmers: progress bars that would stand between ours, and warnings of their own code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = "accelerate|bitsandbytes|datasets|huggingface_hub|peft|tokenizers|torch|transformers"
_SPEAK_TO_PEOPLE = "peft|transformers"  # in plain UserWarnings, of settings that brim has chosen


@contextmanager
def no_library_warnings() -> Iterator[None]:
    """Without libraries' warnings that what they, or brim, call will change: a user can do nothing about them.

    Warnings of other modules, the user's own among them, are shown as before, and in the end all are.
    """
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"({_LIBRARIES}|brim)(\.|$)")
        warnings.filterwarnings("ignore", category=UserWarning, module=rf"({_SPEAK_TO_PEOPLE})(\.|$)")
        yield


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Without transformers' progress bars, which are put back as they were."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
