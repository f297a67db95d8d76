"""Declare the configuration's sections as frozen pydantic models with a description for every key.

Rules between keys of different sections stand in `brim.config`.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
