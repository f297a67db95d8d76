"""Check that an interrupted run goes on as if nothing had happened, on copies of it.

The user's own run is only read.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
