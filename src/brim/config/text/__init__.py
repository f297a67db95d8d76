"""Read and write configurations as text: YAML with its places, masked secrets, values and names in messages."""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
