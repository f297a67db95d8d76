from .composing import (
    Binding as Binding,
    compose_parts as compose_parts,
    compose_steps as compose_steps,
    play as play,
    with_workspaces as with_workspaces,
)
from .layers import (
    depth_of_architecture as depth_of_architecture,
    num_recomputed as num_recomputed,
    recomputing as recomputing,
    with_layers as with_layers,
)
from .operators import DEVICE_OF as DEVICE_OF, attention_flops as attention_flops
from .optimizer import (
    DYNAMIC_MAP_BYTES as DYNAMIC_MAP_BYTES,
    OptimizerRecording as OptimizerRecording,
    paged_bytes as paged_bytes,
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
