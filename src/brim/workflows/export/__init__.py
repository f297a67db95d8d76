"""Write a trained model into a folder of its own, merge it, or send it to the Hub.

Checkpoints, logs and the run's config.yaml never leave the machine.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
