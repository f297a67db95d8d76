from .loading import (
    LoadedTensor as LoadedTensor,
    LoadKind as LoadKind,
    bias_bytes as bias_bytes,
    loaded_tensors as loaded_tensors,
    of_all_layers as of_all_layers,
    quantize_stand_in as quantize_stand_in,
    warmup_bytes as warmup_bytes,
    with_loading as with_loading,
)
