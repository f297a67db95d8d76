"""Advise on a data set: find what tends to spoil fine-tuning in its texts and lengths. It never stops a run."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
