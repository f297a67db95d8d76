"""Turn texts and conversations into token rows and padded batches.

It never decides which rows are used; every cut is recorded in the ledger.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
