"""Show a person what brim found and does: tables, plots and progress. It never imports torch."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
