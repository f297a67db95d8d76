"""One more try, with the caches freed, for what ran out of memory and may be begun anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from brim.batching.caches import free_caches
from brim.batching.oom import is_out_of_memory

T = TypeVar("T")


def second_try(action: Callable[[], T], *, on_failure: Callable[[str], None] = lambda message: None) -> T:
    """What the action gives. The second allocation that fails passes through, like any other exception.

    on_failure: is told the first failure's message.
    """
    try:
        return action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = first_line(error)
    # Here, after the `except` block: its traceback keeps tensors alive.
    free_caches()
    on_failure(message)
    return action()


def first_line(error: BaseException) -> str:
    """What an exception says, without the advice and the traces that some libraries add."""
    return next(iter(str(error).splitlines()), type(error).__name__)
