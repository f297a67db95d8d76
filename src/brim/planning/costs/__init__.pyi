from .calibration import (
    Calibrations as Calibrations,
    Correction as Correction,
    at_once as at_once,
    of_run as of_run,
)
from .generation import (
    PassTimes as PassTimes,
    cache_model as cache_model,
    prefill_tokens as prefill_tokens,
    verified_cache as verified_cache,
)
from .sampling import Shape as Shape
from .time import (
    BoundBy as BoundBy,
    TimeEstimate as TimeEstimate,
    estimate as estimate,
    seconds_of as seconds_of,
    shapes_to_count as shapes_to_count,
)
from .timing import fit_time as fit_time, shapes_to_time as shapes_to_time, time_shapes as time_shapes
from .traces import (
    Traces as Traces,
    most_demanding as most_demanding,
    peak_surface as peak_surface,
    traces_of as traces_of,
    verified as verified,
    versions as versions,
)
from .workloads import (
    ForwardPasses as ForwardPasses,
    SlotsGeneration as SlotsGeneration,
    StaticGeneration as StaticGeneration,
    TrainingSteps as TrainingSteps,
    beside as beside,
    enough_tokens as enough_tokens,
    forward_costs as forward_costs,
)
