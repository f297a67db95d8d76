"""Predict memory and time of any shape of a workload, from a few traces, closed forms or timings.

It never chooses between strategies.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
