"""Write the files of a run's folder and define the results that workflows return. It never runs a model."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
