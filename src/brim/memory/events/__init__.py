"""Describe what a step does to memory, and what it computes: the product of a trace. It needs no torch."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
