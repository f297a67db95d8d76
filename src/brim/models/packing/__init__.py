"""Pack rows of tokens into one sequence: the attention that keeps them apart, and who can have it."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
