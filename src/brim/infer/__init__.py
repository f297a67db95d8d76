"""Run a model over a data set: losses, texts, and metrics made of them. It never updates a weight."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
