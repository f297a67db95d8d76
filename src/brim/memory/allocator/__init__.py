"""Simulate PyTorch's caching allocator on a stream of allocations. It never imports torch."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
