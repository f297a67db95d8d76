"""vLLM for a session: it gets folders, since it loads the weights itself; brim's own model is not loaded for it."""

from __future__ import annotations

from typing import Any

from brim.api.inference import constraint_of, settings_with
from brim.api.plan import device_at_hand
from brim.api.session import Session
from brim.errors import InputError, Problem
from brim.infer.static_engine import end_ids_of
from brim.infer.vllm_engine import VllmEngine, VllmModel
from brim.models.adapter_folder import AdapterFolder, open_adapter
from brim.models.precision import precision
from brim.planning.at_hand import budget_of


def vllm_engine(session: Session, *, rows: int | None) -> VllmEngine:
    """What responds to the session's prompts. rows: at once, where somebody says so.

    Raises InputError where vLLM is not installed, or cannot do what the configuration asks.
    """
    config = session.config
    adapter = _adapter(session)
    _require_plain_weights(session, adapter)
    model = VllmModel(
        folder=str(session.folder.path),
        precision=precision(config.precision),  # type: ignore[arg-type]  # resolved: no `auto`
        device=session.device,
        memory_share=_memory_share(session),
        adapter=None if adapter is None else adapter.path,
        adapter_rank=0 if adapter is None else adapter.settings.r,
        trust_remote_code=config.trust_remote_code,
        rows=rows,
    )
    settings = settings_with(session, end_ids_of(_stored_generation(session), session.encoder.eos_id))
    return VllmEngine(model, settings=settings, seed=config.random_seed, constraint=constraint_of(session, settings))


def _memory_share(session: Session) -> float:
    """Of the GPU's memory: what the run may take, the margin aside, which vLLM's own start-up measures."""
    device = device_at_hand(session.device)
    if device.is_cpu:
        return 1.0  # it will be refused
    budget = budget_of(session.config.memory, device, is_at_hand=True)
    return min((budget.limit_bytes - budget.margin_bytes) / device.memory_bytes, 1.0)


def _adapter(session: Session) -> AdapterFolder | None:
    adapter = session.config.adapter
    if adapter is None or adapter.pretrained_adapter_weights is None:
        return None
    return open_adapter(adapter.pretrained_adapter_weights)


def _require_plain_weights(session: Session, adapter: AdapterFolder | None) -> None:
    config = session.config
    if config.initialize == "random":
        raise _refused("initialize is random, and it loads weights from files")
    if config.quantization is not None:
        raise _refused("the base is quantised as it is loaded, which vLLM does in another way")
    if adapter is not None and adapter.settings.use_dora:
        raise _refused("the adapter is a DoRA, which it does not know")
    if adapter is not None and adapter.settings.bias_type != "none":
        raise _refused("the adapter has biases, which it does not know")


def _stored_generation(session: Session) -> Any:
    """What the model's files say of generation, as the loaded model would."""
    from transformers import AutoConfig, GenerationConfig

    path = session.folder.path
    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(
        AutoConfig.from_pretrained(path, trust_remote_code=session.config.trust_remote_code)
    )


def _refused(reason: str) -> InputError:
    return InputError(
        Problem(
            what=f"vLLM cannot be used: {reason}",
            where="generation.engine: vllm",
            fix="set generation.engine: auto, or `brim export RUN --merge` first and predict with that model",
        )
    )
