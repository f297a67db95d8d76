"""Offer brim to Python: fine-tune large language models, and run them over data sets, on the GPU that you have."""

from __future__ import annotations

from typing import Any

from brim.lazy import lazy_names

_public_name, __dir__, __all__ = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    return _version() if name == "__version__" else _public_name(name)


def _version() -> str:
    """Return the installed version; 0+unknown where brim runs from its source without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("brim")
    except PackageNotFoundError:
        return "0+unknown"
