"""Make prompts from templates, and read labels from answers; neither can run code or run for ever."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
