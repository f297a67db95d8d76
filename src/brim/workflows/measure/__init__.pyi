from .messages import Leak as Leak, PhasePeak as PhasePeak, Stayed as Stayed
from .run import Beside as Beside, measure_memory as measure_memory
