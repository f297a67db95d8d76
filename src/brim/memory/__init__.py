"""Predict how much memory a step takes before it runs. A prediction never needs the weights or the GPU."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
