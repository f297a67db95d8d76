"""Let layers of a model compute by kernels other than PyTorch's: which layers, and whether they agree."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
