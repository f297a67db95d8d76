"""Record what a step does to memory on fake tensors, as a stream of births and deaths of storages.

Streams of a few layers are expanded to the whole model. No value is ever computed, and no weight is loaded.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
