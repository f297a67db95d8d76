"""Parse each verb of the command line, call one function, and show the result. It never does the work itself."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
