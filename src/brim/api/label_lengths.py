"""How many tokens are generated where a response is a label."""

from __future__ import annotations

from dataclasses import replace

from brim.config import Choice, Resolution
from brim.data import TextEncoder
from brim.data.label_tokens import label_room, learned_label_room
from brim.errors import ConfigError, Problem

_KEY = "generation.max_new_tokens"


def with_length_of_labels(resolution: Resolution, encoder: TextEncoder) -> Resolution:
    """The configuration with room for the longest label and its end, and for no more, so that none is planned for.

    That is so where nothing but a label can be generated, and, where no length is set, for labels that are learned.
    Raises ConfigError where a length that is set cuts a label.
    """
    config, room = resolution.config, label_room(resolution.config, encoder)
    was_chosen = any(choice.key == _KEY for choice in resolution.choices)
    if room is None and was_chosen and config.output_features[0].preprocessing.max_sequence_length is None:
        room = learned_label_room(config, encoder)
    if room is None:
        return resolution
    given = config.generation.max_new_tokens
    assert given is not None, "resolved before"
    if given < room - 1 and not was_chosen:
        raise ConfigError(
            Problem(
                what=f"{_KEY} {given:,} cuts labels",
                where=_KEY,
                expected=f"at least {room - 1:,} tokens, those of the longest label",
                fix="raise it, or remove it",
            )
        )
    if given <= room and not was_chosen:
        return resolution
    why = "the longest label and its end" + ("" if was_chosen else f"; {given:,} are set")
    others = tuple(choice for choice in resolution.choices if choice.key != _KEY)
    generation = config.generation.model_copy(update={"max_new_tokens": room})
    return replace(
        resolution,
        config=config.model_copy(update={"generation": generation}),
        choices=(*others, Choice(key=_KEY, value=room, reason=why)),
    )
