"""Trace generation and compose its stream: by brim's own engine, or by transformers' `generate`."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
