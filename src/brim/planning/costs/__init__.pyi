from .generation import CacheModel as CacheModel, PassTimes as PassTimes
from .sampling import Shape as Shape
from .time import (
    BoundBy as BoundBy,
    Calibrations as Calibrations,
    Correction as Correction,
    corrected as corrected,
    seconds_of as seconds_of,
)
from .traces import TracedWorkload as TracedWorkload, Traces as Traces, versions as versions
from .workloads import (
    ForwardPasses as ForwardPasses,
    SlotsGeneration as SlotsGeneration,
    StaticGeneration as StaticGeneration,
    TrainingSteps as TrainingSteps,
    enough_tokens as enough_tokens,
    forward_costs as forward_costs,
)
