from .compose import (
    Binding as Binding,
    compose_parts as compose_parts,
    compose_steps as compose_steps,
    compose_training as compose_training,
    play as play,
    with_workspaces as with_workspaces,
)
from .events import (
    CATEGORIES as CATEGORIES,
    Category as Category,
    EventStream as EventStream,
    Phase as Phase,
    Place as Place,
    Unit as Unit,
    Weight as Weight,
    Work as Work,
    WorkCount as WorkCount,
    WorkPhase as WorkPhase,
    WorkPlace as WorkPlace,
)
from .generation import (
    DECODE as DECODE,
    FILL as FILL,
    PREFILL as PREFILL,
    TRACED_TOKENS as TRACED_TOKENS,
    UnlikeStepsError as UnlikeStepsError,
    compose_generation as compose_generation,
    full_prompts as full_prompts,
    generate_some as generate_some,
    peak_passes as peak_passes,
    slots_at_their_peak as slots_at_their_peak,
)
from .layers import depth_of_architecture as depth_of_architecture, with_layers as with_layers
from .operators import DEVICE_OF as DEVICE_OF, attention_flops as attention_flops
from .optimizer import (
    DYNAMIC_MAP_BYTES as DYNAMIC_MAP_BYTES,
    OptimizerRecording as OptimizerRecording,
    record_optimizer as record_optimizer,
    traceable_optimizer as traceable_optimizer,
)
from .recorder import (
    Training as Training,
    Workload as Workload,
    no_temporaries as no_temporaries,
    note_kernel as note_kernel,
)
from .recording import Recording as Recording, record as record
