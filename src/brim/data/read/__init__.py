"""Read a data set of any supported form into one table, with the place of every row.

It never changes a value in silence: what cannot be read is a fault with its place.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
