"""Compute a model's memory by formulae from its config.json, without torch.

The worked sums explain a prediction, and never decide one.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
