"""Choose the fastest strategy that fits, with reasons, from a configuration, rows' lengths and a device.

It never changes what is learned, unless the configuration leaves the effective batch to the memory.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
