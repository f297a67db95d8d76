from .playback import Heap as Heap, Replay as Replay, replay as replay
from .settings import AllocatorSettings as AllocatorSettings
from .simulator import CachingAllocator as CachingAllocator, SimulatedOutOfMemory as SimulatedOutOfMemory
