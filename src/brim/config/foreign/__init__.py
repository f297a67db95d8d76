"""Recognise keys and values of other fine-tuning tools, to say what to write instead.

It never changes a configuration.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
