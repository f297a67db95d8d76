from .calibration import (
    Calibrations as Calibrations,
    Correction as Correction,
    Peak as Peak,
    at_once as at_once,
    of_run as of_run,
)
from .forward import (
    ForwardModel as ForwardModel,
    ForwardShapes as ForwardShapes,
    beside as beside,
    closed_costs as closed_costs,
    enough_tokens as enough_tokens,
    forward_model as forward_model,
    verified_forward as verified_forward,
    weight_bytes as weight_bytes,
)
from .generation import (
    PassTimes as PassTimes,
    PrefillTokens as PrefillTokens,
    TracedCaches as TracedCaches,
    cache_model as cache_model,
    cache_region as cache_region,
    closed_cache_costs as closed_cache_costs,
    closed_seconds as closed_seconds,
    prefill_tokens as prefill_tokens,
    verified_cache_costs as verified_cache_costs,
)
from .sampling import Sample as Sample, Shape as Shape, passing as passing, region as region, sampled as sampled
from .time import (
    BoundBy as BoundBy,
    TimeEstimate as TimeEstimate,
    estimate as estimate,
    seconds_of as seconds_of,
    shapes_to_count as shapes_to_count,
)
from .timing import fit_time as fit_time, shapes_to_time as shapes_to_time, time_shapes as time_shapes
from .traces import TracedShapes as TracedShapes, overhead_bytes as overhead_bytes, versions as versions
