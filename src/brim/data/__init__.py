"""Prepare data sets: read, render, tokenize and split rows, and record what was cut or dropped.

No row is changed or left out in silence.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
