"""Resolve a configuration for this machine: the device, the base model's folder, the tokenizer, and every `auto`.

If a response is a label, it also decides how many tokens are generated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from brim.config import Choice, Resolution, bounded_by_rows, load_config, resolve
from brim.config.schema import Config
from brim.data import with_labels_of_data
from brim.data.chat import settled_day
from brim.data.read import Data, Files, Source, absolute_files, is_files
from brim.data.tokens import TextEncoder, label_room, learned_label_room, load_encoder
from brim.errors import ConfigError, InputError
from brim.models import device_facts, pick_device, stored_choices, with_stored_quantization
from brim.models.folders import ModelFolder, continued, local_folder, locate, require_floors
from brim.notes import warning

_LEARNED = (  # choices that decide what is learned
    "trainer.epochs",
    "trainer.effective_batch_size",
    "output_features.0.decoder.match",
    "output_features.0.preprocessing.fallback_label",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Hold how much less than this process another one of its run may take; both are to take the same."""

    num_bytes: int
    reason: str  # which one, and what limits it


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Hold what a run needs, except for the weights."""

    config: Config  # resolved: no `auto`, paths absolute
    choices: tuple[Choice, ...]
    folder: ModelFolder
    encoder: TextEncoder
    device: torch.device
    num_processes: int = 1  # of the run: they share a CPU's memory, or have a GPU each
    world_size: int = 1  # processes of the run on all machines
    shortfall: Shortfall | None = None  # of the one that may take least


def open_session(config: Config, *, is_one_of_several: bool = False) -> Session:
    """Resolve a configuration. Raises ConfigError, ModelError; InputError for several processes that do not share."""
    _require_one_process(unless=is_one_of_several)
    require_floors()
    # Processes that share no CUDA meet by gloo, which knows no tensors but the CPU's.
    device = torch.device("cpu") if is_one_of_several and not torch.cuda.is_available() else pick_device()
    folder = locate(config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code)
    settled = with_stored_quantization(config, folder)
    moved = _with_absolute_paths(settled.having("base_model", folder.name))
    resolution = resolve(moved, device_facts(device), context_length=folder.context_length)
    encoder = load_encoder(folder, trust_remote_code=config.trust_remote_code)
    resolution = with_length_of_labels(resolution, encoder)
    chat, days = settled_day(resolution.config.chat, encoder)
    return Session(
        config=resolution.config.having("chat", chat),
        choices=(*stored_choices(config, folder), *_stored_bits(config, settled), *resolution.choices, *days),
        folder=folder,
        encoder=encoder,
        device=device,
    )


def _stored_bits(config: Config, settled: Config) -> list[Choice]:
    if settled.quantization is None or config.quantization is not None:
        return []
    return [Choice(key="quantization.bits", value=settled.quantization.bits, reason="as the base model is stored")]


def dataset_of(config: Config, given: Data | None) -> Data:
    """Return the given data set, else the configuration's. Raises ConfigError if there is none."""
    if given is not None:
        return given
    if config.dataset is not None:
        return config.dataset
    raise ConfigError(
        what="there is no data set",
        expected="--dataset FILE, the key `dataset`, or dataset=… in Python",
        fix="name a csv, tsv, json, jsonl or parquet file, or a saved datasets folder",
    )


def with_dataset(session: Session, dataset: Data) -> Session:
    """Return the session with the data set's path in its configuration, so that the run's folder names its data.

    Data that is not in a file has no path, and then none is named.
    """
    files = absolute_files(cast(Files, dataset)) if is_files(dataset) else None
    return replace(session, config=session.config.having("dataset", files))


def with_labels(session: Session, source: Source) -> Session:
    """Return the session with the labels of its category, if they are to come from the data.

    Raises DataError and ConfigError as `with_labels_of_data`.
    """
    config, choices = with_labels_of_data(session.config, source)
    if not choices:
        return session
    labelled = Resolution(config=config, choices=(*session.choices, *choices))
    resolution = with_length_of_labels(labelled, session.encoder)
    return replace(session, config=resolution.config, choices=resolution.choices)


def with_settings(session: Session, **sections: Mapping[str, Any] | None) -> Session:
    """Return the session with other values in sections of its configuration, checked like those of a file.

    Raises ConfigError.
    """
    changed = {name: settings for name, settings in sections.items() if settings}
    if not changed:
        return session
    tree = session.config.model_dump(exclude_unset=True)
    asked = load_config({**tree, **{name: {**tree.get(name, {}), **changed[name]} for name in changed}}).config
    resolution = resolve(asked, device_facts(session.device), context_length=session.folder.context_length)
    resolved = with_length_of_labels(resolution, session.encoder).config
    return replace(
        session, config=session.config.model_copy(update={name: getattr(resolved, name) for name in changed})
    )


def with_choices(session: Session, choices: Sequence[Choice]) -> Session:
    """Return the session with choices that could only be made later, also in its configuration."""
    settled = {choice.key for choice in choices}
    others = (choice for choice in session.choices if choice.key not in settled)
    return replace(session, config=Choice.made_in(session.config, choices), choices=(*others, *choices))


def with_rows(session: Session, num_rows: int) -> Session:
    """Return the session with a default effective batch that is no larger than the number of rows."""
    config, choices = bounded_by_rows(session.config, session.choices, num_rows)
    return replace(session, config=config, choices=choices)


def choice_notes(choices: Sequence[Choice]) -> list[str]:
    """Return the choices with their reasons: warnings if they decide what is learned, else notes and details."""
    return [warning(str(each), topic="configuration") if each.key in _LEARNED else each.as_note() for each in choices]


def say_nothing(line: str) -> None:
    """Ignore a note, for callers who do not want any."""


def _require_one_process(*, unless: bool) -> None:
    """Refuse to run under torchrun and the like: each process would do all of the work, into the same folder."""
    num_processes = os.environ.get("WORLD_SIZE", "")
    if not unless and num_processes.isdecimal() and int(num_processes) > 1:
        raise InputError(
            what=f"several processes are not supported here, but the environment asks for {num_processes}",
            where="WORLD_SIZE",
            fix="start one process, without torchrun or accelerate launch; `brim train` alone takes several",
        )


def _with_absolute_paths(config: Config) -> Config:
    """Return a configuration that works from any folder once it is saved."""
    if config.dataset is not None:
        config = config.having("dataset", absolute_files(config.dataset))
    adapter, retrieval = config.adapter, config.prompt.retrieval
    if adapter is not None and adapter.pretrained_adapter_weights is not None:
        config = config.having("adapter", continued(adapter))
    if retrieval is not None and (sentences := local_folder(retrieval.model_name or "")) is not None:
        config = config.having("prompt.retrieval.model_name", str(sentences))
    if config.chat is not None and config.chat.template is not None:
        # pathlib's own methods raise for a loop of links and for the home of an unknown user. A path that leads nowhere
        # is kept, and is reported when it is read.
        template = os.path.realpath(os.path.expanduser(config.chat.template))  # noqa: PTH111
        config = config.having("chat.template", template)
    return config


_KEY = "generation.max_new_tokens"


def with_length_of_labels(resolution: Resolution, encoder: TextEncoder) -> Resolution:
    """Limit generation to the tokens of the longest label and its end, so that no more than these are planned for.

    This holds if nothing but a label can be generated and, where no length is set, for labels that are learned.
    Raises ConfigError if a length that is set cuts a label.
    """
    config, longest = resolution.config, label_room(resolution.config, encoder)
    was_chosen = any(choice.key == _KEY for choice in resolution.choices)
    if longest is None and was_chosen and config.output_features[0].preprocessing.max_sequence_length is None:
        longest = learned_label_room(config, encoder)
    if longest is None:
        return resolution
    given = config.generation.max_new_tokens
    assert given is not None, "resolved before"
    if given < longest - 1 and not was_chosen:
        raise ConfigError(
            what=f"{_KEY} {given:,} is too short for the labels",
            where=_KEY,
            expected=f"at least {longest - 1:,} tokens, those of the longest label",
            fix="raise it, or remove it",
        )
    if given <= longest and not was_chosen:
        return resolution
    why = "the longest label and its end" + ("" if was_chosen else f"; {given:,} are set")
    others = tuple(choice for choice in resolution.choices if choice.key != _KEY)
    return replace(
        resolution,
        config=config.having(_KEY, longest),
        choices=(*others, Choice(key=_KEY, value=longest, reason=why)),
    )
