from .noise_scale import (
    NUM_GROUPS as NUM_GROUPS,
    Adaptation as Adaptation,
    NoiseMeasurement as NoiseMeasurement,
    NoiseScale as NoiseScale,
)
from .schedule import (
    BatchSchedule as BatchSchedule,
    Phase as Phase,
    Stretch as Stretch,
)
