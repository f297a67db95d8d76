"""Find and read the folders of base models and adapters, and refuse what they may not ask for; without torch."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
