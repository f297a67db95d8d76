"""`brim predict --plan`: how a data set would be predicted, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from brim.api.generation_request import GenerationRequest, engine_by_settings, longest_first, rows_by_hand
from brim.api.memory import Asked, ask
from brim.api.planned_generation import plan_generation
from brim.api.predict_policies import with_policies
from brim.api.predicting import Wanted, prompts_asked
from brim.api.session import Say, Session, say_nothing, with_labels
from brim.config import Config
from brim.data import Data, load_encoder, read
from brim.data.chat_day import settled_day
from brim.errors import ConfigError, DataError, Problem
from brim.planning.generation_plan import GenerationPlan


def plan_prediction(
    config: Config,
    dataset: Data | None,
    wanted: Wanted,
    *,
    device: str | None = None,
    memory_bytes: int | None = None,
    notes: Sequence[str] = (),
    say: Say = say_nothing,
) -> GenerationPlan:
    """What `brim predict` would decide for these rows: how many run together, memory, time and engine.

    Reads the tokenizer, the base model's config.json and the data; loads no weights. dataset: default: the key
    `dataset`. device: a name of the catalogue, or "cpu"; memory_bytes: of any other GPU; neither: the device at hand.

    Raises ConfigError, DataError, ModelError and InputError. Prompts that do not fit are no error here: the plan says
    so.
    """
    is_at_hand = device in (None, "cpu") and memory_bytes is None
    if device is None and memory_bytes is None and not torch.cuda.is_available():
        device = "cpu"
    asked = ask(config, phase="generate", device=device, memory_bytes=memory_bytes)
    data = dataset if dataset is not None else config.dataset
    if data is None:
        raise ConfigError(_no_data())
    session = with_policies(_session(asked), on_error=wanted.on_error, on_overlong=wanted.on_overlong)
    source = read(data)
    session = with_labels(session, source)
    prompts = prompts_asked(source, session, wanted, [*notes, *map(str, asked.choices)], say).prompts
    if not len(prompts):
        raise DataError(Problem(what="there is no prompt to plan for", where=source.name, fix="name another data set"))
    engine, reason = engine_by_settings(session.config, asked.architecture)
    return plan_generation(
        GenerationRequest(
            config=session.config,
            folder=asked.folder,
            architecture=asked.architecture,
            device=asked.device,
            is_at_hand=is_at_hand,
            lengths=longest_first(prompts.lengths),
            fixed_rows=rows_by_hand(session.config),
            engine=engine,
            engine_reason=reason,
        ),
        say=say,
    )


def _session(asked: Asked) -> Session:
    encoder = load_encoder(asked.folder, trust_remote_code=asked.config.trust_remote_code)
    chat, _ = settled_day(asked.config.chat, encoder)
    return Session(
        config=asked.config.model_copy(update={"chat": chat}),
        choices=(),
        folder=asked.folder,
        encoder=encoder,
        device=torch.device("cpu"),
    )


def _no_data() -> Problem:
    return Problem(
        what="there is no data set, and a plan depends on how long its prompts are",
        expected="--dataset FILE, the key `dataset`, or dataset=… in Python",
        fix="name a csv, tsv, json, jsonl or parquet file; `brim memory --phase generate` needs none",
    )
