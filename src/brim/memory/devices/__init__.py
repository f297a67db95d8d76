"""Describe devices and their speed, and decide how many bytes a run may take on them."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
