"""Predict the memory of one rank under fully sharded data parallelism, from the stream of a single GPU.

It never starts a process group.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
