"""Predict, evaluate, embed and chat: run a model over rows and keep what it gives. It never trains."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
