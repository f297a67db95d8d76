"""Make the engine that writes a job's responses: brim's own where it can, else transformers' `generate`.

vLLM, where it is asked for, gets folders, since it loads the weights itself; brim's own model is not loaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.data.chat import chat_template
from brim.data.tokens import label_tokens
from brim.errors import ConfigError, InputError
from brim.infer.engines import (
    USUAL_PASS_TOKENS,
    Constraint,
    Engine,
    FixedRoom,
    LabelConstraint,
    Room,
    RowsAtOnce,
    SlotsEngine,
    Smaller,
    StaticEngine,
    VllmEngine,
    VllmModel,
    end_ids_of,
    generation_settings,
)
from brim.memory.devices import budget_of, device_at_hand
from brim.models import LLM, precision
from brim.models.folders import AdapterFolder, open_adapter
from brim.models.loss import base_model
from brim.planning.request import cannot
from brim.session import Session


def vllm_engine(session: Session, *, rows: int | None) -> VllmEngine:
    """Return what responds to the session's prompts. rows: at once, where somebody says so.

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
    """Return the share of the GPU that the run may take, without the margin, as vLLM's own start-up measures it."""
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
    """Return what the model's files say of generation, as the loaded model would."""
    from transformers import AutoConfig, GenerationConfig

    path = session.folder.path
    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(
        AutoConfig.from_pretrained(path, trust_remote_code=session.config.trust_remote_code)
    )


def _refused(reason: str) -> InputError:
    return InputError(
        what=f"vLLM cannot be used: {reason}",
        where="generation.engine: vllm",
        fix="set generation.engine: auto, or `brim export RUN --merge` first and predict with that model",
    )


def engine_by_hand(llm: LLM, session: Session, *, batches: RowsAtOnce) -> Engine:
    """Return what responds to the session's prompts, so many at a time."""
    room = FixedRoom(batches.num_rows, prefill_tokens=USUAL_PASS_TOKENS)
    return engine_for(llm, session, room=room, on_smaller=batches.on_smaller)


def engine_for(
    llm: LLM,
    session: Session,
    *,
    room: Room,
    on_smaller: Callable[[Smaller], None] = lambda smaller: None,
    kind: str | None = None,
) -> Engine:
    """Return what responds to the session's prompts.

    on_smaller: called each time that fewer rows go on together. kind: where it was chosen already; default: as
    `generation.engine` says; vLLM, which loads the weights itself, is made elsewhere. Raises ConfigError for an engine
    that cannot do what the configuration asks.
    """
    settings = settings_of(llm, session)
    how: dict[str, Any] = {
        "settings": settings,
        "room": room,
        "seed": session.config.random_seed,
        "device": llm.device,
        "precision": llm.precision,
        "constraint": constraint_of(session, settings),
        "on_smaller": on_smaller,
    }
    asked = kind or session.config.generation.engine
    base = base_model(llm.model)
    against = SlotsEngine.why_not(type(base), base.config, settings)
    if asked == "slots" and against:
        raise ConfigError(cannot(asked, against))
    if asked == "static" or against:
        return StaticEngine(llm.model, **how)
    return SlotsEngine(llm.model, **how)


def constraint_of(session: Session, settings: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint to labels of a category that asks for it. settings: what `settings_of` gives."""
    feature = session.config.output_features[0]
    decoder = feature.categories
    if decoder is None or not decoder.constrain_to_vocabulary:
        return None
    if not feature.labels:
        raise ConfigError(
            what=f"the labels of `{feature.name}` are not known, to which decoder.constrain_to_vocabulary holds it",
            where="output_features.0.decoder.match",
            fix="name the labels in output_features.0.preprocessing.vocab, or take the folder of a run",
        )
    return LabelConstraint(label_tokens(feature.labels, session.encoder), end_ids=settings["eos_token_id"])


def settings_of(llm: LLM, session: Session) -> dict[str, Any]:
    """Return how the model generates, for transformers' GenerationConfig."""
    return settings_with(session, end_ids_of(llm.model.generation_config, session.encoder.eos_id))


def settings_with(session: Session, own_ends: Sequence[int]) -> dict[str, Any]:
    """Return the same as `settings_of`. own_ends: tokens at which the model stops by itself."""
    encoder, chat = session.encoder, session.config.chat
    ends = [] if chat is None else chat_template(chat, encoder).end_ids(encoder)
    return generation_settings(
        session.config.generation,
        pad_id=encoder.pad_id,
        end_ids=list(dict.fromkeys([*ends, *own_ends])),
    )
