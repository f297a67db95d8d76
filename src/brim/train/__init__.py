"""Run the training loop, and keep what it needs to be resumed. It never decides how much memory may be used."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
