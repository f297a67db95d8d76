from .checkpoint import (
    Checkpoint as Checkpoint,
    CheckpointStore as CheckpointStore,
    CheckpointWriter as CheckpointWriter,
    TrainState as TrainState,
    optimizer_state as optimizer_state,
    require_masks as require_masks,
    restore_optimizer as restore_optimizer,
    restore_weights as restore_weights,
    trained_weights as trained_weights,
)
from .parts import mapped as mapped, write_parts as write_parts
