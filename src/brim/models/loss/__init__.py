"""Compute the loss of a micro-batch from an architecture's body and head, with all logits at once or in chunks."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
