from .base import (
    Engine as Engine,
    Finished as Finished,
    FinishReason as FinishReason,
    Response as Response,
    generation_settings as generation_settings,
    respond_to as respond_to,
)
from .batching import (
    Batches as Batches,
    RowsAtOnce as RowsAtOnce,
    RowsByCost as RowsByCost,
    RowsByTrial as RowsByTrial,
    Smaller as Smaller,
    longest_first as longest_first,
)
from .cache import Passes as Passes
from .capacity import (
    CacheCosts as CacheCosts,
    CacheShape as CacheShape,
    FixedRoom as FixedRoom,
    MemoryRoom as MemoryRoom,
    Room as Room,
    usual_pass_tokens as usual_pass_tokens,
)
from .continuous import SlotsEngine as SlotsEngine
from .sampling import LabelConstraint as LabelConstraint, NextToken as NextToken, Writing as Writing
from .transformers import StaticEngine as StaticEngine
from .vllm import VllmEngine as VllmEngine
