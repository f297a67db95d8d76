"""Decide which rows of a source are used, to which split each belongs, and what becomes of those that cannot be used.

Nothing here asks what a model is to learn from a row: language models and tables share it.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
