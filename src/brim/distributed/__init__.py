"""Train in several processes as in one: deal micro-batches, add gradients up, and decide each thing once.

`torch.distributed` starts the processes and carries the sums; no decision depends on how many there are.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
