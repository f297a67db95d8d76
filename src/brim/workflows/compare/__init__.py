"""Train several configurations with several seeds on equal tokens, and compare their losses.

Each run has a process of its own; a failed one never ends the others.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
