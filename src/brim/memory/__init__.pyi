from .budget import (
    Budget as Budget,
    budget_of as budget_of,
    enforce as enforce,
    limit_lifted as limit_lifted,
    map_large_blocks as map_large_blocks,
    returns_at_once as returns_at_once,
)
from .device import (
    PACKING_BYTES as PACKING_BYTES,
    Device as Device,
    DeviceSpeed as DeviceSpeed,
    cpu_device as cpu_device,
    device_speed as device_speed,
    devices as devices,
    find_device as find_device,
)
from .predict import (
    Asked as Asked,
    UntraceableError as UntraceableError,
    ask as ask,
    device_at_hand as device_at_hand,
    predict_memory as predict_memory,
    read_architecture as read_architecture,
    require_in_context as require_in_context,
    require_whole as require_whole,
    tracing as tracing,
    with_checkpointing as with_checkpointing,
)
from .prediction import (
    MOST_GPUS as MOST_GPUS,
    MOST_MADE_UP as MOST_MADE_UP,
    MOST_MEMORY_BYTES as MOST_MEMORY_BYTES,
    MOST_ROWS as MOST_ROWS,
    MOST_TOKENS as MOST_TOKENS,
    MemoryPrediction as MemoryPrediction,
    Timeline as Timeline,
)
from .traces import static_stream as static_stream
from .variants import (
    Compared as Compared,
    Failed as Failed,
    OnCard as OnCard,
    compare_memory as compare_memory,
    explain_memory as explain_memory,
    what_helps as what_helps,
)
from .workload import ConfigWorkload as ConfigWorkload
