"""Find what tends to spoil fine-tuning in a data set's texts and lengths. Advice never stops a run."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
