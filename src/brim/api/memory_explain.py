"""`brim memory --explain`: the napkin for what was predicted."""

from __future__ import annotations

from brim.api.memory import read_architecture, with_checkpointing
from brim.config import Config, DeviceFacts, resolve
from brim.errors import InputError
from brim.memory.device import find_device
from brim.memory.napkin import Napkin, napkin
from brim.memory.napkin_settings import settings_of
from brim.memory.prediction import MemoryPrediction
from brim.models.folder import locate
from brim.models.quantization import with_stored_quantization


def explain_memory(config: Config, prediction: MemoryPrediction) -> Napkin:
    """The worked sums of a prediction. config: the one that was predicted for."""
    folder = locate(
        config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code, config_only=True
    )
    settled = with_stored_quantization(config, folder)
    facts = DeviceFacts(kind="cuda", bf16=_has_bf16(prediction.device))
    resolved = resolve(settled, facts, context_length=folder.context_length).config
    if prediction.gradient_checkpointing is not None:
        resolved = with_checkpointing(resolved, prediction.gradient_checkpointing)
    # What config.json leaves to transformers' defaults is filled in.
    base = {**read_architecture(folder, trust_remote_code=config.trust_remote_code).to_dict(), **folder.config}
    settings = settings_of(
        resolved,
        base,
        phase=prediction.phase,
        batch_size=prediction.batch_size,
        sequence_length=prediction.sequence_length,
        world_size=prediction.world_size,
        chunked_loss=_in_chunks(resolved, prediction),
    )
    return napkin(base, settings)


def _has_bf16(device: str) -> bool:
    try:
        return find_device(device).has_bf16
    except InputError:  # one of which only the memory is known, or the one at hand
        return True


def _in_chunks(config: Config, prediction: MemoryPrediction) -> bool:
    """Whether the loss was computed in chunks: as it was set, or as the model allowed."""
    given = config.trainer.chunked_loss
    return any(choice.startswith("trainer.chunked_loss: True") for choice in prediction.choices) or given is True
