from .settings import AllocatorSettings as AllocatorSettings
from .simulator import (
    CachingAllocator as CachingAllocator,
    Heap as Heap,
    Replay as Replay,
    SimulatedOutOfMemory as SimulatedOutOfMemory,
    replay as replay,
)
