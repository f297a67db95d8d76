"""Train one run in a straight line: prepare, plan, launch, loop, export; or resume it."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
