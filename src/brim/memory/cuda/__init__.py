"""Model what a CUDA GPU does differently from the CPU, as its caching allocator sees it.

Steps are traced on fake CPU tensors: no GPU is needed, and no value is computed.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
