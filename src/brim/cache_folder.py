"""Where brim keeps what it can make anew: copies of data, what traces found, plans."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """BRIM_CACHE_DIR; else brim's folder in the user's cache (XDG_CACHE_HOME); it need not be there yet."""
    own = os.environ.get("BRIM_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "brim"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir())
