from .adaptive_step import AdaptiveStep as AdaptiveStep
from .costs import Costs as Costs, Surface as Surface
from .finder import Found as Found, Probe as Probe, Search as Search, find_batch_size as find_batch_size
from .microbatch import (
    ByLength as ByLength,
    ByRows as ByRows,
    CapChange as CapChange,
    Cutter as Cutter,
    MicroBatch as MicroBatch,
    cutter_of as cutter_of,
)
from .noise_scale import (
    NUM_GROUPS as NUM_GROUPS,
    Adaptation as Adaptation,
    NoiseMeasurement as NoiseMeasurement,
    NoiseScale as NoiseScale,
)
from .oom import (
    OutOfMemory as OutOfMemory,
    attempt as attempt,
    free_caches as free_caches,
    is_out_of_memory as is_out_of_memory,
    or_explain as or_explain,
    random_states as random_states,
    restore_random_states as restore_random_states,
    run_batches as run_batches,
    second_try as second_try,
)
from .partition import Shape as Shape, Totals as Totals, cut_totals as cut_totals
from .prober import (
    AddressSpacePeak as AddressSpacePeak,
    Counts as Counts,
    PeakMeter as PeakMeter,
    Prober as Prober,
    gradients_at_hand as gradients_at_hand,
    no_trace as no_trace,
    peak_meter as peak_meter,
    probed as probed,
    standing_for as standing_for,
)
from .schedule import (
    BatchSchedule as BatchSchedule,
    Phase as Phase,
    Stretch as Stretch,
)
from .step import GradientStep as GradientStep, Part as Part, StepOutcome as StepOutcome
