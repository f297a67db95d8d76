"""Turn numbers, categories and truth values of a table, beside its texts, into rows that a model with heads reads.

Statistics come from the training split alone and are kept with the run; the source is read a block at a time.
"""

from brim.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
