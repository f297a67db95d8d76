from .predict import (
    Asked as Asked,
    ask as ask,
    predict_memory as predict_memory,
    require_in_context as require_in_context,
    require_whole as require_whole,
    with_checkpointing as with_checkpointing,
)
from .prediction import (
    MOST_GPUS as MOST_GPUS,
    MOST_MADE_UP as MOST_MADE_UP,
    MOST_MEMORY_BYTES as MOST_MEMORY_BYTES,
    MOST_ROWS as MOST_ROWS,
    MOST_TOKENS as MOST_TOKENS,
    MemoryPrediction as MemoryPrediction,
    Offload as Offload,
    Timeline as Timeline,
)
from .traces import UntraceableError as UntraceableError, tracing as tracing
from .variants import (
    Compared as Compared,
    Failed as Failed,
    OnCard as OnCard,
    compare_memory as compare_memory,
    explain_memory as explain_memory,
    what_helps as what_helps,
)
from .workload import ConfigWorkload as ConfigWorkload
