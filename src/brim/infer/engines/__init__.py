"""Write responses to prompts, many at a time, by brim's own engine, transformers or vLLM.

An engine never decides which prompts there are, or where responses are kept.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
