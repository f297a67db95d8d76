"""Predict what bitsandbytes' layers allocate on CUDA.

It works on fake tensors: none of bitsandbytes' kernels runs, and no value is computed.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
