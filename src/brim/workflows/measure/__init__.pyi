from .messages import Leak as Leak, PhasePeak as PhasePeak
from .run import Beside as Beside, measure_memory as measure_memory
