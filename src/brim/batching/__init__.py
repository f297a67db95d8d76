"""Partition an effective batch into micro-batches, and keep a step within memory.

It decides sizes, schedules and retries; it never loads a model or data, and knows no configuration.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
