"""Decide how many rows a step has: by a schedule of phases, or by the gradient noise that is measured."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
