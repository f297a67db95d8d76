from .adaptive_step import AdaptiveStep as AdaptiveStep
from .bins import MULTIPLE as MULTIPLE
from .costs import Costs as Costs, Surface as Surface
from .growth import (
    NUM_GROUPS as NUM_GROUPS,
    Adaptation as Adaptation,
    BatchSchedule as BatchSchedule,
    NoiseMeasurement as NoiseMeasurement,
    NoiseScale as NoiseScale,
    Phase as Phase,
    Stretch as Stretch,
)
from .microbatch import (
    ByLength as ByLength,
    ByRows as ByRows,
    CapChange as CapChange,
    Cutter as Cutter,
    MicroBatch as MicroBatch,
    by_costs as by_costs,
    cutter_of as cutter_of,
)
from .partition import Shape as Shape, Totals as Totals, cut_totals as cut_totals
from .step import GradientStep as GradientStep, Part as Part, StepOutcome as StepOutcome, run_batches as run_batches
