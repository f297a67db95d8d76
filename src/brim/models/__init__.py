"""Locate, check, load and adapt the base model, and make it give a loss. It never trains."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
