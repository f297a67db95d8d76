"""Find what fits a device's memory, by trying it, and go on after memory ran out."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
