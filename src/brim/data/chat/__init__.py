"""Write conversations out by a chat template, and mark what the assistant says.

A template is foreign code: it never runs outside the sandbox.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
