"""Measure what a workload takes on the local device: peaks by phase, beside the predicted ones.

`measure_memory` is the entry point; `messages` says what comes back. The work is done in processes of their own, so
that one measurement does not stand in another's memory.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
