from .attention import (
    CachedRows as CachedRows,
    PackedAttention as PackedAttention,
    PackedRows as PackedRows,
    packed_rows as packed_rows,
    passing as passing,
)
from .trial import packing_choice as packing_choice, packing_fit as packing_fit, small_model as small_model
