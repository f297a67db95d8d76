"""How many tokens are generated where a response can be nothing but a label."""

from __future__ import annotations

from dataclasses import replace

from brim.config import Choice, Resolution
from brim.data import TextEncoder
from brim.data.label_tokens import label_tokens, most_tokens
from brim.errors import ConfigError, Problem

_KEY = "generation.max_new_tokens"


def with_length_of_labels(resolution: Resolution, encoder: TextEncoder) -> Resolution:
    """The configuration with room for the longest label and its end, and for no more, so that none is planned for.

    Raises ConfigError where a length that is set cuts a label.
    """
    config = resolution.config
    feature = config.output_features[0]
    decoder = feature.categories
    if decoder is None or not decoder.constrain_to_vocabulary or config.chat is not None:
        return resolution
    tokens = label_tokens(feature.labels, encoder)
    longest, given = most_tokens(tokens), config.generation.max_new_tokens
    was_chosen = any(choice.key == _KEY for choice in resolution.choices)
    assert given is not None, "resolved before"
    if not was_chosen and given < longest:
        raise ConfigError(
            Problem(
                what=f"{_KEY} {given:,} cuts labels",
                where=_KEY,
                expected=f"at least {longest:,} tokens, those of the longest label",
                fix="raise it, or remove it",
            )
        )
    room = longest + 1
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
