"""Read one YAML file with Ludwig's keys for language models; check it, resolve it and write it back.

It never imports torch, and never opens a data set.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
