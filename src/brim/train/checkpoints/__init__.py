"""Keep the state of a run on disk: whole or not at all, written by one rank or a part by each, read by any number."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
