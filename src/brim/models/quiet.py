"""What libraries say to programmers, and would stand between what we say to users."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Without transformers' progress bars, which are put back as they were."""
    from transformers.utils import logging as theirs

    shown = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            theirs.enable_progress_bar()


def import_bitsandbytes() -> None:
    """Import bitsandbytes, or have it imported already, with nothing but its errors in the log.

    It warns of each cast of an input, in every layer and step. PEFT imports it for any adapter. On CPUs with
    AVX512-BF16 it would, where the package `kernels` is installed, fetch native code from the Hub and run it; what
    needs that code is switched off (see models/quantization.py), so `kernels` is hidden from it meanwhile.
    """
    log = logging.getLogger("bitsandbytes")
    if log.level == logging.NOTSET:  # else somebody wants to hear it
        log.setLevel(logging.ERROR)
    if "bitsandbytes" in sys.modules:
        return
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kernels"}
    sys.modules.update(dict.fromkeys({"kernels", *hidden}))  # type: ignore[arg-type]
    try:
        import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hidden)
