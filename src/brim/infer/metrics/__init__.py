"""Measure models by scores of rows, labels and texts, with 95% confidence intervals."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
